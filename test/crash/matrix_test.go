package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/crash/cases"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
	"github.com/minicri/minicri/test/nodetest"
)

// row is a row of the matrix on the kernel.
type row struct {
	cases.Row
	operation operation
	options   []nodetest.PodOption
	faults    []fault
}

// rows is the matrix; with -short, as make test has it, one case for each step: package sandbox has all in memory.
func rows() (rows []row) {
	list := cases.All()
	if testing.Short() {
		list = cases.Each()
	}
	for _, c := range list {
		r := row{Row: c, operation: operations[c.Operation], options: kinds[c.Pod.Name]}
		for _, name := range c.Faults {
			if !slices.Contains(cases.Timed, name) {
				r.faults = append(r.faults, fault{name: name, strike: strikes[name], config: configs[name]})
			}
		}
		if len(r.faults) > 0 {
			rows = append(rows, r)
		}
	}
	return rows
}

var kinds = map[string][]nodetest.PodOption{
	cases.OwnNetwork.Name: {nodetest.HostPort(8080, 80)}, cases.Userns.Name: {nodetest.UserNamespace},
	cases.HostNetwork.Name: {nodetest.HostNetwork()}, cases.LateInterfaces.Name: {interfaceSysctl},
}

func interfaceSysctl(c *runtimeapi.PodSandboxConfig) {
	c.Linux.Sysctls = map[string]string{"net.ipv4.conf.all.rp_filter": "0"}
}

// TestMatrix runs all cases, those of one row one after the other on one node.
func TestMatrix(t *testing.T) {
	harness.AllSteps(t, "../../sandbox/sandbox.go", cases.Steps)
	count := 0
	for _, r := range rows() {
		count += len(r.Points) * len(r.faults)
		t.Run(r.Name(), r.test)
	}
	fmt.Printf("crash matrix: %d cases\n", count)
}

func (r row) test(t *testing.T) {
	var options []nodetest.Option
	if r.faults[0].config != nil {
		options = append(options, r.faults[0].config)
	}
	n := newNode(t, options...)
	if r.Faults[0] != cases.Reboot {
		n.runWitness(t)
	}
	for _, point := range r.Points {
		for _, f := range r.faults {
			t.Run(point+"/"+f.name, func(t *testing.T) {
				trial := trial{node: n, row: r, point: point, fault: f}
				trial.test(t)
			})
		}
	}
	n.fillNetwork()
}

type trial struct {
	*node
	row
	point string
	fault fault

	config *runtimeapi.PodSandboxConfig
	id     string // once the pod runs
	before leak.Snapshot
}

func (c *trial) test(t *testing.T) {
	c.config = c.PodConfig("case", c.options...)
	harness.Check(t, os.WriteFile(c.calls, nil, 0o600))
	c.before = c.Look()

	t.Cleanup(func() { c.Disarm(t) })
	c.operation.prepare(t, c)
	c.fault.strike(t, c)
	if !c.Running() {
		c.Start()
	}
	c.Disarm(t)

	c.checkWitness(t)
	c.removeListed(t)
	c.runAgain(t)
	c.wantSame(t, c.before)
	c.checkDetached(t)
}

// runWitness runs the pod that has to stay Ready through all cases.
func (n *node) runWitness(t *testing.T) { n.witness = n.status(t, n.RunPod(n.PodConfig("witness"))) }

func (n *node) checkWitness(t *testing.T) {
	if n.witness != nil {
		same(t, "status of the other pod", n.status(t, n.witness.Id), n.witness)
		n.checkPause(t, n.witness.Id)
	}
}

// checkPause: Ready means that pause lives (P5).
func (n *node) checkPause(t *testing.T, id string) {
	pid := n.pausePID(t, id)
	isReady := func(pod *runtimeapi.PodSandbox) bool {
		return pod.Id == id && pod.State == runtimeapi.PodSandboxState_SANDBOX_READY
	}
	// The work of a request that was given up may have ended it meanwhile.
	harness.Want(t, alive(pid) || !slices.ContainsFunc(n.list(t), isReady), "sandbox %s is Ready, but process %d is no pause", id, pid)
}

// removeListed: what is listed can be stopped and removed, at the first try.
func (c *trial) removeListed(t *testing.T) {
	for _, pod := range c.list(t) {
		if pod.Id == c.witness.GetId() {
			continue
		}
		if pod.State == runtimeapi.PodSandboxState_SANDBOX_READY {
			c.checkPause(t, pod.Id)
		}
		err := errors.Join(c.stop(harness.Limited(t), pod.Id), c.remove(harness.Limited(t), pod.Id))
		harness.Want(t, err == nil, "stop and remove what is listed: %v", err)
	}
}

// runAgain: the name is free at once (P8), or leads to the pod whose request
// was given up (P15); there is never more than one of the name (P16).
func (c *trial) runAgain(t *testing.T) {
	id, err := c.run(harness.Limited(t), c.config)
	harness.Check(t, err)
	isOfTheName := func(pod *runtimeapi.PodSandbox) bool { return pod.Metadata.Name == c.config.Metadata.Name }
	listed := slices.DeleteFunc(c.list(t), func(pod *runtimeapi.PodSandbox) bool { return !isOfTheName(pod) })
	harness.Want(t, len(listed) == 1 && listed[0].Id == id && listed[0].State == runtimeapi.PodSandboxState_SANDBOX_READY,
		"want %s alone and Ready under the name, got %v", id, listed)
	c.checkPause(t, id)
	c.RemovePod(id)
}

// checkDetached: each ADD that ran, were it of the first plugin alone, is
// followed by a DEL of the whole chain, last to first (P2, P6, P11).
func (c *trial) checkDetached(t *testing.T) {
	t.Helper()
	for id, calls := range c.callsByID(t) {
		if last := strings.LastIndex(calls, "ADD"); last >= 0 && !strings.Contains(calls[last:], "DEL last, DEL middle, DEL first") {
			t.Errorf("sandbox %s: no DEL of the whole chain after its ADD: %s", id, calls)
		}
	}
}

// callsByID are the runs of the plugins for each sandbox, in order.
func (n *node) callsByID(t *testing.T) map[string]string {
	data := harness.Read(t, n.calls)
	calls := make(map[string]string)
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		calls[fields[2]] += fields[0] + " " + fields[1] + ", "
	}
	return calls
}

// fillNetwork: every address but the witness's can be given out again.
func (n *node) fillNetwork() {
	for i := range addresses - 1 {
		n.RunPod(n.PodConfig(fmt.Sprintf("fill-%d", i)))
	}
}

type operation struct {
	name string
	// prepare brings the pod to where the operation begins.
	prepare func(*testing.T, *trial)
	call    func(context.Context, *trial) error
	// also is armed beside the point.
	also []string
}

var operations = map[string]operation{
	cases.Run: {cases.Run, nothing, callRun, nil}, cases.Stop: {cases.Stop, running, callStop, nil},
	cases.StopWithFailingDEL: {cases.StopWithFailingDEL, running, callStop, []string{"middle DEL error"}},
	cases.Remove:             {cases.Remove, running, callRemove, nil},
	cases.RemoveStopped:      {cases.RemoveStopped, stopped, callRemove, nil},
	cases.Undo:               {cases.Undo, nothing, callRun, []string{"pod/start before error"}},
	cases.Recovery:           {cases.Recovery, killed, callStart, nil},
}

func nothing(*testing.T, *trial) {}

func running(t *testing.T, c *trial) {
	id, err := c.run(harness.Limited(t), c.config)
	harness.Check(t, err)
	c.id = id
}

func stopped(t *testing.T, c *trial) {
	running(t, c)
	harness.Check(t, c.stop(harness.Limited(t), c.id))
}

func killed(t *testing.T, c *trial) {
	c.Arm(t, "pod/start before kill")
	_, err := c.run(harness.Limited(t), c.config)
	harness.Want(t, err != nil, "the daemon was killed, and the request succeeded")
	c.waitEnd(t)
}

func callRun(ctx context.Context, c *trial) error {
	_, err := c.run(ctx, c.config)
	return err
}

func callStop(ctx context.Context, c *trial) error   { return c.stop(ctx, c.id) }
func callRemove(ctx context.Context, c *trial) error { return c.remove(ctx, c.id) }

// callStart: the work begins in the background once the daemon answers, or before; so it may be killed before.
func callStart(_ context.Context, c *trial) error { return c.TryStart() }

// attack: containers: a container joins the pid namespace of another (TARGET); that one ends meanwhile, and a process of the node gets its pid
// held: the container is not created: minicri identifies the target by a pidfd, not by its number
// field: containerd and CRI-O join the process that has the number then
func TestTargetWhosePidIsReused(t *testing.T) {
	n := newNode(t, nodetest.Alone()) // others would take the pid
	n.ImportBusybox()
	pod := n.PodConfig("target")
	sandbox := n.RunPod(pod)
	target := n.RunContainer(sandbox, pod, nodetest.Container("target", "sleep", "1000000"))
	answer := nodetest.Call(t, n.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: target, Verbose: true})
	var info struct{ PID int }
	harness.Check(t, json.Unmarshal([]byte(answer.GetInfo()["info"]), &info))

	n.Arm(t, "container/create before hang")
	debugger := nodetest.Container("debugger", "sleep", "1000000")
	debugger.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: target}
	failed := make(chan error, 1)
	go func() {
		_, err := n.CreateContainer(sandbox, pod, debugger)
		failed <- err
	}()
	harness.Eventually(t, "the container is about to be made", n.WasHit)
	harness.Check(t, unix.Kill(info.PID, unix.SIGKILL))
	harness.Eventually(t, "the target has ended", func() bool { return errors.Is(unix.Kill(info.PID, 0), unix.ESRCH) })
	takePid(t, info.PID)
	n.Disarm(t)
	err := <-failed
	harness.Want(t, strings.Contains(fmt.Sprint(err), "has ended"), "the container joins the namespace of a process of the node: %v", err)
}

func takePid(t *testing.T, pid int) {
	harness.Eventually(t, fmt.Sprintf("a process has the pid %d", pid), func() bool {
		harness.Check(t, os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0))
		other := exec.Command("sleep", "1000000")
		harness.Check(t, other.Start())
		end := func() { _ = other.Process.Kill(); _ = other.Wait() }
		if other.Process.Pid == pid {
			t.Cleanup(end)
			return true
		}
		end()
		return false
	})
}
