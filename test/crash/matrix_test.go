package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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

type fault struct {
	name   string
	strike func(*testing.T, *trial)
	config nodetest.Option // of the node, if all faults of its row have it
}

var strikes = map[string]func(*testing.T, *trial){
	cases.Error: strikeError, cases.DaemonKilled: strikeKill, cases.StarterKilled: strikeStarter,
	cases.ShimKilled:          func(t *testing.T, c *trial) { strikeShim(t, c, false) },
	cases.ShimAndDaemonKilled: func(t *testing.T, c *trial) { strikeShim(t, c, true) },
	cases.ShimKilledAtWork:    strikeShimAtWork,
	cases.StartedTwice:        strikeKillTwice, cases.Terminated: strikeTerminate, cases.CutOff: strikeCutOff,
	cases.Cancelled: strikeCancel,
	cases.Reboot:    strikeReboot, cases.RebootTwice: strikeRebootTwice,
}

var configs = map[string]nodetest.Option{cases.CutOff: nodetest.Config(`shutdown = "200ms"`)}

// begin arms the point, calls the operation beside the test, and waits until
// the point is reached. The result of the call comes from the channel.
func (c *trial) begin(ctx context.Context, t *testing.T, action string) <-chan error {
	c.Arm(t, append([]string{c.point + " " + action}, c.operation.also...)...)
	done := make(chan error, 1)
	if c.operation.name == cases.Recovery { // a node is started by its test's goroutine alone
		done <- c.operation.call(ctx, c)
	} else {
		go func() { done <- c.operation.call(ctx, c) }()
	}
	harness.Eventually(t, "point "+c.point+" is reached", c.WasHit)
	return done
}

func strikeError(t *testing.T, c *trial) {
	err := <-c.begin(harness.Limited(t), t, "error")
	if c.operation.name == cases.Recovery {
		harness.Check(t, err)
		// What cannot be rolled back is listed then.
		harness.Eventually(t, "recovery ends", func() bool { return len(nodetest.Info[[]any](t, c.node.Node, "building")) == 0 })
		c.Disarm(t)
		return
	}
	c.Disarm(t)
	harness.Want(t, err != nil, "the step failed, and the request succeeded")
	if strings.HasSuffix(c.point, " ADD") {
		wantPluginError(t, err, c.point)
	}
}

// wantPluginError: the error names plugin, verb, message and code (P11).
func wantPluginError(t *testing.T, err error, point string) {
	for _, part := range []string{"plugin trip", "CNI ADD", "failpoint " + point, "code 100"} {
		harness.Want(t, strings.Contains(fmt.Sprint(err), part), "the error lacks %q: %v", part, err)
	}
}

// strikeStarter: the process that makes the container dies at the point, by itself.
func strikeStarter(t *testing.T, c *trial) {
	err := <-c.begin(harness.Limited(t), t, "kill")
	c.Disarm(t)
	if err == nil && c.point != "starter/answered" { // what it has answered may be taken over
		t.Error("the starter was killed, and the request succeeded")
	}
}

// strikeKill: the daemon dies at the point, by itself; or, where the point is
// in a plugin or a starter, while that hangs, which the next daemon has to end.
func strikeKill(t *testing.T, c *trial) {
	c.killAtPoint(t)
	if strings.HasSuffix(c.point, " ADD") {
		harness.Eventually(t, "the plugin has ended", func() bool { return !c.tripRuns(t) })
	}
	c.Start()
}

func (c *trial) killAtPoint(t *testing.T) {
	if strings.HasSuffix(c.point, " ADD") || strings.HasSuffix(c.point, " DEL") || strings.HasPrefix(c.point, "starter/") {
		done := c.begin(harness.Limited(t), t, "hang")
		c.Kill()
		<-done
		return
	}
	err := <-c.begin(harness.Limited(t), t, "kill")
	c.waitEnd(t)
	harness.Want(t, err != nil || c.operation.name == cases.Recovery, "the daemon was killed, and the request succeeded")
	c.Disarm(t)
}

// tripRuns: whether a plugin of the daemon's ADD runs.
func (n *node) tripRuns(t *testing.T) bool {
	for _, file := range harness.Glob(t, "/proc/[0-9]*/environ") {
		environment, _ := os.ReadFile(file) // the process may have ended
		if text := string(environment); strings.Contains(text, "CNI_PATH="+n.State) && strings.Contains(text, "CNI_COMMAND=ADD") {
			return true
		}
	}
	return false
}

// strikeReboot: what is listed then is NotReady, and its network is given back by itself.
func strikeReboot(t *testing.T, c *trial) {
	c.killAtPoint(t)
	c.Reboot()
	c.Disarm(t)
	c.Start()
	c.wantAllDown(t)
}

func strikeRebootTwice(t *testing.T, c *trial) {
	strikeReboot(t, c)
	c.Crash()
	c.wantAllDown(t)
}

func (n *node) wantAllDown(t *testing.T) {
	for _, pod := range n.list(t) {
		harness.Want(t, pod.State == runtimeapi.PodSandboxState_SANDBOX_NOTREADY, "after a reboot: %v", pod)
	}
	n.wantAddressesBack(t)
}

// strikeKillTwice: the daemon that comes next is killed too, and the one after it has to know all that it knew.
func strikeKillTwice(t *testing.T, c *trial) {
	strikeKill(t, c)
	c.Crash()
}

// strikeTerminate stops the daemon while a step is under way. The daemon waits for a step of its own. It ends at once
// beside a DEL, whose result the next daemon takes: a plugin that is ended half-way can leave something behind.
func strikeTerminate(t *testing.T, c *trial) {
	done := c.begin(harness.Limited(t), t, "hang")
	if strings.HasSuffix(c.point, " DEL") {
		c.stopSoon(t, done)
	} else {
		const said = "shutting down; pods keep running"
		before := strings.Count(c.Log(), said)
		harness.Check(t, unix.Kill(c.PID(), unix.SIGTERM))
		harness.Eventually(t, "the daemon shuts down", func() bool { return strings.Count(c.Log(), said) > before })
		c.Disarm(t)
		c.waitEnd(t)
		<-done
	}
	c.Start()
	c.Disarm(t)
}

// strikeCutOff: a request that continues is cancelled at the limit and what it made rolled
// back, also where its plugin hangs.
func strikeCutOff(t *testing.T, c *trial) {
	c.stopSoon(t, c.begin(harness.Limited(t), t, "hang"))
	c.Disarm(t)
	c.Start()
	c.wantListed(t, c.witness.Id)
}

// stopSoon stops the daemon beside a request: what it undoes takes a busy machine seconds, a
// plugin that hangs would take minutes.
func (c *trial) stopSoon(t *testing.T, request <-chan error) {
	c.Stop()
	harness.Want(t, <-request != nil, "the request succeeded")
}

func strikeShim(t *testing.T, c *trial, andDaemon bool) {
	done := c.begin(harness.Limited(t), t, "hang")
	kill(t, c.awaitShim(t))
	if andDaemon {
		c.Kill()
		<-done
		c.Start()
		return
	}
	c.Disarm(t)
	<-done // it may succeed: the successor adopts the prepared pause
}

func strikeShimAtWork(t *testing.T, c *trial) {
	done := c.begin(harness.Limited(t), t, "hang")
	shim, before := c.awaitShim(t), c.inMaking()
	c.Disarm(t)
	harness.Eventually(t, "the shim begins to make pause", func() bool { return c.inMaking() != before || len(done) > 0 })
	kill(t, shim)
	<-done // it may have succeeded: the shim may have done its work
}

func kill(t *testing.T, pid int) {
	t.Helper()
	err := unix.Kill(pid, unix.SIGKILL)
	harness.Need(t, err == nil || err == unix.ESRCH, "%v", err)
}

// inMaking counts the containers of the node's supervisors: the directory of one is the first that is made.
func (n *node) inMaking() int {
	found, _ := filepath.Glob(filepath.Join(n.State, "shims", "*", "containers", "*"))
	return len(found)
}

func (n *node) awaitShim(t *testing.T) (pid int) {
	harness.Eventually(t, "a shim runs", func() bool {
		running := n.Supervisors()
		if len(running) > 0 {
			pid = running[0]
		}
		return pid != 0
	})
	return pid
}

func strikeCancel(t *testing.T, c *trial) {
	ctx, cancel := context.WithCancel(harness.Limited(t))
	defer cancel()
	done := c.begin(ctx, t, "hang")
	cancel()
	wantCode(t, <-done, codes.Canceled)
	c.goOn(t)
}

// goOn lets the work continue that the caller has given up. Where it has failed
// and is being undone, anyone who asks again first hears of that failure.
func (c *trial) goOn(t *testing.T) {
	c.Disarm(t)
	if c.operation.name != cases.Undo {
		return
	}
	err := c.operation.call(harness.Limited(t), c)
	harness.Want(t, err == nil || strings.Contains(err.Error(), "failpoint pod/start before"), "the retry of a request that fails: %v", err)
}

func wantCode(t *testing.T, err error, code codes.Code) {
	harness.Want(t, status.Code(err) == code, "want code %v, got %v", code, err)
}
