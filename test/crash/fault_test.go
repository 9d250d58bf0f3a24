package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/crash/cases"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

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
