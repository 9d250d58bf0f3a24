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

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
	"github.com/minicri/minicri/test/nodetest"
)

// row is a part of the matrix: an operation on a kind of pod, each of its points with each of the faults.
type row struct {
	operation operation
	pod       pod
	points    []string
	faults    []fault
}

// rows is the matrix; with -short, as make test has it, a part of it: an error
// and a kill at each step of a pod with a network of its own.
func rows() []row {
	if testing.Short() {
		some := []fault{fails, daemonKilled}
		return []row{
			{run, ownNetwork, ownNetwork.run, some},
			{stop, ownNetwork, stopping(ownNetwork), some},
			{removeStopped, ownNetwork, slices.Concat(removing()[:2], releaseAgain(), removing()[2:]), some},
			{undo, ownNetwork, teardown(ownNetwork), some},
			{run, userns, starter, []fault{starterKilled, shimKilled}},
			{stop, ownNetwork, []string{"first DEL"}, []fault{terminated}}, // of the plugin that comes last
			{run, ownNetwork, adds, []fault{cutOff}},
		}
	}
	all := []fault{fails, daemonKilled, cancelled, deadlinePassed}
	ending := []fault{startedTwice, terminated}
	return []row{
		{run, ownNetwork, ownNetwork.run, ending},
		{run, ownNetwork, adds, []fault{cutOff}},
		{stop, ownNetwork, stopping(ownNetwork), ending},
		{remove, ownNetwork, removing(), ending},
		{undo, ownNetwork, teardown(ownNetwork), ending},
		{recovery, ownNetwork, teardown(ownNetwork), []fault{startedTwice}},

		{run, ownNetwork, ownNetwork.run, all},
		{run, ownNetwork, ownNetwork.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, ownNetwork, []string{"pod/prepare before"}, shimKilledInTime},
		{run, ownNetwork, withinLimit(ownNetwork.run), []fault{limitPassed}},
		{run, userns, userns.run, all},
		{run, userns, userns.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, userns, starter, []fault{starterKilled, daemonKilled, shimKilled, shimAndDaemonKilled}},
		{run, hostNetwork, hostNetwork.run, all},
		{run, hostNetwork, hostNetwork.shim, []fault{shimKilled, shimAndDaemonKilled}},
		{run, lateInterfaces, lateInterfaces.run, all},
		{run, lateInterfaces, lateInterfaces.shim, []fault{shimKilled, shimAndDaemonKilled}},

		{stop, ownNetwork, stopping(ownNetwork), all},
		{stop, ownNetwork, release(ownNetwork), []fault{limitPassed}},
		{stop, userns, stopping(userns), []fault{fails, daemonKilled}},
		{stop, hostNetwork, stopping(hostNetwork), []fault{fails, daemonKilled}},
		{stopWithFailingDEL, ownNetwork, []string{"rename attachments"}, all},

		{remove, ownNetwork, slices.Concat(stopping(ownNetwork), removing()), all},
		{remove, userns, slices.Concat(stopping(userns), removing()), []fault{daemonKilled}},
		{removeStopped, ownNetwork, slices.Concat(removing()[:2], releaseAgain(), removing()[2:]), all},
		{removeStopped, hostNetwork, slices.Concat(removing()[:2], releaseAgain(), removing()[2:]), []fault{fails, daemonKilled}},

		{undo, ownNetwork, teardown(ownNetwork), all},
		{undo, userns, teardown(userns), []fault{fails, daemonKilled}},
		{undo, hostNetwork, teardown(hostNetwork), []fault{fails, daemonKilled}},

		{recovery, ownNetwork, teardown(ownNetwork), []fault{fails, daemonKilled}},
		{recovery, userns, teardown(userns), []fault{fails, daemonKilled}},

		{run, ownNetwork, ownNetwork.run, rebooted},
		{run, userns, userns.run, rebooted},
		{stop, ownNetwork, stopping(ownNetwork), rebooted},
		{removeStopped, ownNetwork, slices.Concat(removing()[:2], releaseAgain(), removing()[2:]), rebooted},
	}
}

// pod is a kind of pod: what it is, as the steps' lists ask for, the points that
// Run passes for it, in order, and those of them at which its shim waits.
type pod struct {
	name    string
	options []nodetest.PodOption
	is      []string
	run     []string
	shim    []string
}

// What a pod is.
const (
	inNetwork = "own network"
	inUsers   = "user namespace"
)

// steps are those of a pod's life, by operation, in order (package sandbox).
var steps = map[string][]step.Name{
	"run": {
		"pod/check", "pod/reserve", "pod/record", "pod/sync", "pod/files", "pod/userns", "pod/netns", "pod/loopback", "pod/prepare",
		"pod/cni add", "pod/addresses", "pod/nri run", "pod/start",
	},
	"update": {"pod/nri update", "pod/nri updated"},
	"stop": {
		"pod/stop containers", "pod/nri stop", "pod/end pause", "pod/cni del", "pod/remove netns", "pod/remove userns", "pod/unmount files",
		"pod/record stopped",
	},
	"remove": {"pod/remove containers", "pod/nri remove", "pod/remove files", "pod/remove record"},
}

// isOf reports whether a pod on a node without NRI has the step.
func isOf(name step.Name, is []string) bool {
	switch name {
	case "pod/userns":
		return slices.Contains(is, inUsers)
	case "pod/netns", "pod/loopback", "pod/cni add", "pod/addresses":
		return slices.Contains(is, inNetwork)
	}
	return !strings.HasPrefix(name.Own(), "nri ")
}

var (
	ownNetwork = pod{
		name: "own network", options: []nodetest.PodOption{nodetest.HostPort(8080, 80)}, is: []string{inNetwork},
		run:  points("run", inNetwork),
		shim: []string{"pod/prepare after", "first ADD", "last ADD", "pod/addresses after", "pod/start before"},
	}
	userns = pod{
		name: "user namespace", options: []nodetest.PodOption{nodetest.UserNamespace},
		is: []string{inNetwork, inUsers}, run: points("run", inNetwork, inUsers),
		shim: []string{"pod/prepare after", "pod/start before"},
	}
	hostNetwork = pod{
		name: "host network", options: []nodetest.PodOption{nodetest.HostNetwork()}, run: points("run"),
		shim: []string{"pod/prepare after", "pod/start before"},
	}
	// lateInterfaces is prepared after ADD, see needsInterfaces in package sandbox.
	lateInterfaces = pod{
		name: "interface sysctl", options: []nodetest.PodOption{interfaceSysctl}, is: []string{inNetwork},
		run: from(points("run", inNetwork), "pod/cni add before"), shim: []string{"pod/prepare after", "pod/start before"},
	}
)

// starter are the points in the life of the process that makes pause where it is not launched: in a user namespace.
var starter = []string{"starter/asked", "starter/made", "starter/answered"}

var adds = []string{"first ADD", "middle ADD", "last ADD"}

// inside are the points that are passed within a step: where a record gets its name, and the plugins of the chain.
func inside(name step.Name, is []string) []string {
	own := slices.Contains(is, inNetwork)
	switch {
	case name == "pod/record":
		return []string{"rename sandboxes"}
	case name == "pod/start" || name == "pod/record stopped":
		return []string{"rename facts"}
	case name == "pod/cni add":
		return append([]string{"rename attachments"}, adds...)
	case name == "pod/cni del" && own:
		return []string{"last DEL", "middle DEL", "first DEL"}
	}
	return nil
}

// points are those that an operation passes, in order, as package failpoint names them.
func points(operation string, is ...string) (all []string) {
	for _, name := range steps[operation] {
		if !isOf(name, is) {
			continue
		}
		all = append(all, name.Before())
		all = append(all, inside(name, is)...)
		all = append(all, name.After())
	}
	return all
}

func from(points []string, first string) []string { return points[slices.Index(points, first):] }
func until(points []string, last string) []string { return points[:slices.Index(points, last)+1] }

// stopping are the points of Stop, removing those of Remove after it.
func stopping(p pod) []string { return points("stop", p.is...) }
func removing() []string      { return points("remove") }

// teardown are the points at which destroy removes all of a pod.
func teardown(p pod) []string {
	return slices.Concat(release(p), from(removing(), "pod/remove files before"))
}

// release are the points at which Stop and destroy remove what the kernel and the network hold.
func release(p pod) []string {
	return until(from(stopping(p), "pod/end pause before"), "pod/unmount files after")
}

// releaseAgain is the same where all of it is gone.
func releaseAgain() []string { return release(pod{}) }

// withinLimit are those of a Run to which the daemon's own limit applies.
func withinLimit(run []string) []string { return from(run, "pod/record before") }

func interfaceSysctl(c *runtimeapi.PodSandboxConfig) {
	c.Linux.Sysctls = map[string]string{"net.ipv4.conf.all.rp_filter": "0"}
}

// TestMatrix runs all cases, those of one row one after the other on one node.
func TestMatrix(t *testing.T) {
	harness.AllSteps(t, "../../sandbox/sandbox.go", steps)
	count := 0
	for _, r := range rows() {
		count += len(r.points) * len(r.faults)
		t.Run(fmt.Sprintf("%s/%s/%s", r.operation.name, r.pod.name, r.faults[0].name), r.test)
	}
	fmt.Printf("crash matrix: %d cases\n", count)
}

func (r row) test(t *testing.T) {
	var options []nodetest.Option
	if r.faults[0].config != nil {
		options = append(options, r.faults[0].config)
	}
	n := newNode(t, options...)
	if r.faults[0].name != rebooted[0].name {
		n.runWitness(t)
	}
	for _, point := range r.points {
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
	c.config = c.PodConfig("case", c.pod.options...)
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

var (
	run                = operation{"run", nothing, callRun, nil}
	stop               = operation{"stop", running, callStop, nil}
	stopWithFailingDEL = operation{"stop with failing DEL", running, callStop, []string{"middle DEL error"}}
	remove             = operation{"remove", running, callRemove, nil}
	removeStopped      = operation{"remove stopped", stopped, callRemove, nil}
	// undo is a Run that fails at its end.
	undo = operation{"undo", nothing, callRun, []string{"pod/start before error"}}
	// recovery is the start of a daemon after one that was killed in Run.
	recovery = operation{"recovery", killed, callStart, nil}
)

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
