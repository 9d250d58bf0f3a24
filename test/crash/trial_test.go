package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/leak"
)

// trial is one case of the matrix.
type trial struct {
	*node
	row
	witness *runtimeapi.PodSandboxStatus
	point   string
	fault   fault

	config *runtimeapi.PodSandboxConfig
	id     string // once the pod runs
	before leak.Snapshot
}

func (c *trial) test(t *testing.T) {
	c.config = c.PodConfig("case", c.pod.options...)
	check(t, os.WriteFile(c.calls, nil, 0o600))
	c.before = c.Look()

	t.Cleanup(func() { c.disarm(t) })
	c.operation.prepare(t, c)
	c.fault.strike(t, c)
	if !c.Running() {
		c.Start()
	}
	c.disarm(t)

	c.checkWitness(t)
	c.removeListed(t)
	c.runAgain(t)
	c.checkNothingLeft(t)
	c.checkDetached(t)
}

// runWitness runs the pod that has to stay Ready through all cases.
func (n *node) runWitness(t *testing.T) *runtimeapi.PodSandboxStatus {
	t.Helper()
	return n.status(t, n.RunPod(n.PodConfig("witness")))
}

// checkWitness: a pod that was Ready stays as it was (P23).
func (c *trial) checkWitness(t *testing.T) {
	t.Helper()
	now := c.status(t, c.witness.Id)
	if now.String() != c.witness.String() {
		t.Errorf("the other pod changed:\nwas %v\nis  %v", c.witness, now)
	}
	c.checkPause(t, c.witness.Id)
}

// checkPause: Ready means that pause lives (P5).
func (c *trial) checkPause(t *testing.T, id string) {
	t.Helper()
	pid := c.pausePID(t, id)
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	isReady := func(pod *runtimeapi.PodSandbox) bool {
		return pod.Id == id && pod.State == runtimeapi.PodSandboxState_SANDBOX_READY
	}
	// The work of a request that was given up may have ended it meanwhile.
	if (err != nil || filepath.Base(exe) != "pause") && slices.ContainsFunc(c.list(t), isReady) {
		t.Errorf("sandbox %s is Ready, but process %d is %q (%v)", id, pid, exe, err)
	}
}

// removeListed: what is listed can be stopped and removed, at the first try.
func (c *trial) removeListed(t *testing.T) {
	t.Helper()
	for _, pod := range c.list(t) {
		if pod.Id == c.witness.Id {
			continue
		}
		if pod.State == runtimeapi.PodSandboxState_SANDBOX_READY {
			c.checkPause(t, pod.Id)
		}
		if err := c.stop(limited(t), pod.Id); err != nil {
			t.Errorf("stop what is listed: %v", err)
		}
		if err := c.remove(limited(t), pod.Id); err != nil {
			t.Errorf("remove what was listed: %v", err)
		}
	}
}

// runAgain: the name is free at once (P8), or leads to the pod whose request
// was given up (P15); there is never more than one of the name (P16).
func (c *trial) runAgain(t *testing.T) {
	t.Helper()
	id, err := c.run(limited(t), c.config)
	check(t, err)
	isOfTheName := func(pod *runtimeapi.PodSandbox) bool { return pod.Metadata.Name == c.config.Metadata.Name }
	listed := slices.DeleteFunc(c.list(t), func(pod *runtimeapi.PodSandbox) bool { return !isOfTheName(pod) })
	if len(listed) != 1 || listed[0].Id != id || listed[0].State != runtimeapi.PodSandboxState_SANDBOX_READY {
		t.Errorf("want %s alone and Ready under the name, got %v", id, listed)
	}
	c.checkPause(t, id)
	c.RemovePod(id)
}

func (c *trial) checkNothingLeft(t *testing.T) {
	t.Helper()
	for _, difference := range c.Differences(c.before) {
		t.Error(difference)
	}
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
	t.Helper()
	data, err := os.ReadFile(n.calls)
	check(t, err)
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

// operation is what is interrupted.
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
	t.Helper()
	id, err := c.run(limited(t), c.config)
	check(t, err)
	c.id = id
}

func stopped(t *testing.T, c *trial) {
	t.Helper()
	running(t, c)
	check(t, c.stop(limited(t), c.id))
}

func killed(t *testing.T, c *trial) {
	t.Helper()
	c.arm(t, "pod/start before kill")
	if _, err := c.run(limited(t), c.config); err == nil {
		t.Error("the daemon was killed, and the request succeeded")
	}
	c.waitEnd(t)
}

func callRun(ctx context.Context, c *trial) error {
	_, err := c.run(ctx, c.config)
	return err
}

func callStop(ctx context.Context, c *trial) error   { return c.stop(ctx, c.id) }
func callRemove(ctx context.Context, c *trial) error { return c.remove(ctx, c.id) }

// callStart: the work begins in the background once the daemon answers, or
// before; so it may be killed before.
func callStart(_ context.Context, c *trial) error { return c.TryStart() }
