package sandbox_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/test/crash/cases"
	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

// TestCrashes runs all cases of the crash matrix in memory. The daemon dies when its goroutines stop at a point and the
// next daemon opens the same directories. Then the state is one that the kubelet can go on from, and in the end nothing
// is left of any pod.
func TestCrashes(t *testing.T) {
	count := 0
	for _, r := range cases.All() {
		count += len(r.Points) * len(r.Faults)
		t.Run(r.Name(), func(t *testing.T) {
			t.Parallel()
			for _, point := range r.Points {
				for _, fault := range r.Faults {
					t.Run(point+"/"+fault, func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) { newTrial(t, r, point, fault).test(t) })
					})
				}
			}
		})
	}
	harness.Same(t, "the number of cases", count, 1310)
}

type trial struct {
	*fake.Node
	row          cases.Row
	point, fault string

	d        *fake.Daemon
	started  <-chan error // the outcome of the operation recovery
	config   *runtimeapi.PodSandboxConfig
	id       string // once the pod runs
	witness  string // the id of a pod that stays Ready
	before   []string
	requests sync.WaitGroup
	release  func() // ends the wait at the point
}

func newTrial(t *testing.T, row cases.Row, point, fault string) *trial {
	c := &trial{Node: fake.New(t), row: row, point: point, fault: fault, config: podConfig("case"), release: func() {}}
	switch row.Pod.Name {
	case cases.HostNetwork.Name:
		c.config.Linux.SecurityContext = hostNetwork
	case cases.Userns.Name:
		c.config.Linux.SecurityContext = userNamespace
	case cases.LateInterfaces.Name:
		c.config.Linux.Sysctls = map[string]string{"net.ipv4.conf.all.rp_filter": "0"}
	}
	if fault == cases.LimitPassed {
		c.Limits = sandbox.Limits{Run: shortLimit, Destroy: shortLimit, Create: time.Minute, Kill: shortLimit}
		c.NetworkLimits.Add, c.NetworkLimits.Del = shortLimit, shortLimit
	}
	return c
}

const shortLimit = 5 * time.Second

func (c *trial) test(t *testing.T) {
	c.d = c.Start()
	if c.fault != cases.Reboot && c.fault != cases.RebootTwice {
		var err error
		c.witness, err = c.d.Sandboxes.Run(c.d.Ctx, podConfig("witness"), "")
		harness.Check(t, err)
	}
	c.before = c.Leaks()
	c.prepare(t)
	c.strike(t)
	c.disarm()

	c.checkWitness(t)
	c.removeListed(t)
	c.runAgain(t)
	c.awaitRetries(func() bool { return slices.Equal(c.Leaks(), c.before) })
	c.checkWitness(t)
	left := c.Leaks()
	harness.Same(t, "left", without(left, c.before), nil)
	harness.Same(t, "gone", without(c.before, left), nil)
	for id, calls := range c.Calls() {
		last := strings.LastIndex(calls, "ADD")
		detached := id == c.witness || last < 0 || strings.Contains(calls[last:], "DEL last, DEL middle, DEL first")
		harness.Want(t, detached, "sandbox %s: no DEL of the whole chain after its ADD: %s", id, calls)
	}
}

func without(all, some []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(one string) bool { return slices.Contains(some, one) })
}

func (c *trial) prepare(t *testing.T) {
	var err error
	switch c.row.Operation {
	case cases.Stop, cases.StopWithFailingDEL, cases.Remove, cases.RemoveStopped:
		c.id, err = c.d.Sandboxes.Run(c.d.Ctx, c.config, "")
		harness.Check(t, err)
	case cases.Recovery:
		go func() { _, _ = c.d.Sandboxes.Run(c.d.Ctx, c.config, "") }()
		<-c.Arm("pod/start before", c.hang())
		c.d.Kill()
		c.disarm()
	}
	if c.row.Operation == cases.RemoveStopped {
		harness.Check(t, c.d.Sandboxes.Stop(c.d.Ctx, c.id))
	}
}

// begin calls the operation, and returns when it has reached the point. The point calls do.
func (c *trial) begin(ctx context.Context, t *testing.T, do func() error) <-chan error {
	switch c.row.Operation {
	case cases.StopWithFailingDEL:
		c.Arm("middle DEL", func() error { return errors.New("middle fails") })
	case cases.Undo:
		c.Arm("pod/start before", func() error { return errors.New("start fails") })
	}
	hit, done := c.Arm(c.point, do), make(chan error, 1)
	if c.row.Operation == cases.Recovery {
		c.d, c.started = c.Begin()
	} else {
		c.requests.Add(1)
		answered := make(chan error, 1)
		go func() {
			defer c.requests.Done()
			answered <- c.call(ctx)
		}()
		go func() { // a client returns when its context ends
			select {
			case err := <-answered:
				done <- err
			case <-ctx.Done():
				done <- ctx.Err()
			}
		}()
	}
	select {
	case <-hit:
	case <-time.After(time.Minute):
		t.Fatalf("the point is not reached")
	}
	return done
}

func (c *trial) call(ctx context.Context) (err error) {
	switch c.row.Operation {
	case cases.Run, cases.Undo:
		_, err = c.d.Sandboxes.Run(ctx, c.config, "")
	case cases.Stop, cases.StopWithFailingDEL:
		err = c.d.Sandboxes.Stop(ctx, c.id)
	case cases.Remove, cases.RemoveStopped:
		err = c.d.Sandboxes.Remove(ctx, c.id)
	}
	return err
}

func (c *trial) hang() func() error {
	released := make(chan struct{})
	c.release = sync.OnceFunc(func() { close(released) })
	return func() error {
		<-released
		return nil
	}
}

func (c *trial) disarm() {
	c.Disarm()
	c.release()
}

func (c *trial) strike(t *testing.T) {
	fails := func() error { return errors.New("failpoint") }
	ctx, cancel := context.WithCancel(c.d.Ctx)
	defer cancel()
	switch c.fault {
	case cases.Error:
		done := c.begin(ctx, t, fails)
		if c.row.Operation == cases.Recovery {
			harness.Check(t, <-c.started)
			<-c.d.Sandboxes.RolledBack()
			return
		}
		harness.Want(t, <-done != nil, "the step failed, and the request succeeded")
	case cases.DaemonKilled, cases.StartedTwice:
		c.kill(ctx, t)
		c.d = c.Start()
		if c.fault == cases.StartedTwice {
			c.d.Kill()
			c.d = c.Start()
		}
	case cases.Reboot, cases.RebootTwice:
		c.kill(ctx, t)
		c.Reboot()
		c.disarm()
		c.d = c.Start()
		c.wantAllDown(t)
		if c.fault == cases.RebootTwice {
			c.d.Kill()
			c.d = c.Start()
			c.wantAllDown(t)
		}
	case cases.StarterKilled:
		err := <-c.begin(ctx, t, fails)
		harness.Want(t, err != nil || c.point == "starter/answered", "the starter was killed, and the request succeeded")
	case cases.ShimKilled:
		done := c.begin(ctx, t, c.hang())
		c.KillSupervisor()
		c.disarm()
		<-done // the request may succeed: the successor adopts the prepared pause
	case cases.ShimAndDaemonKilled:
		c.begin(ctx, t, c.hang())
		c.KillSupervisor()
		c.Disarm()
		c.d.Kill()
		c.d = c.Start()
	case cases.Cancelled:
		done := c.begin(ctx, t, c.hang())
		cancel()
		harness.Want(t, errors.Is(<-done, context.Canceled), "it was not cancelled")
		c.goOn(t)
	case cases.DeadlinePassed:
		ctx, cancel = context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		err := <-c.begin(ctx, t, c.hang())
		harness.Want(t, errors.Is(err, context.DeadlineExceeded), "its deadline did not pass: %v", err)
		c.goOn(t)
	case cases.LimitPassed:
		done := c.begin(ctx, t, c.hang())
		time.Sleep(shortLimit)
		c.disarm()
		<-done // a step that was the last one succeeds late
	case cases.Terminated:
		done := c.begin(ctx, t, c.hang())
		if strings.HasSuffix(c.point, " DEL") {
			c.d.Stop(time.Minute, &c.requests)
			harness.Want(t, <-done != nil, "the request succeeded")
		} else {
			time.AfterFunc(100*time.Millisecond, c.release)
			c.d.Stop(time.Minute, &c.requests)
		}
		c.d = c.Start()
	case cases.CutOff:
		done := c.begin(ctx, t, c.hang())
		c.d.Stop(200*time.Millisecond, &c.requests)
		harness.Want(t, <-done != nil, "the request succeeded")
		c.disarm()
		c.d = c.Start()
		list := c.d.Sandboxes.List()
		harness.Want(t, len(list) == 1 && list[0].ID == c.witness, "%d pods are listed", len(list))
	case cases.ShimKilledAtWork:
		done := c.begin(ctx, t, c.hang())
		c.disarm()
		c.KillSupervisor()
		<-done
	}
}

// kill kills the daemon at the point. A plugin or a starter that hangs there still hangs beside the next daemon.
func (c *trial) kill(ctx context.Context, t *testing.T) {
	c.begin(ctx, t, c.hang())
	c.d.Kill()
	if strings.HasPrefix(c.point, "pod/") || strings.HasPrefix(c.point, "rename ") {
		c.Disarm()
	}
}

// goOn lets the work continue that the caller has given up. If the work has failed and is being undone, the next caller
// gets that failure.
func (c *trial) goOn(t *testing.T) {
	c.Disarm()
	c.release()
	if c.row.Operation == cases.Undo {
		err := c.call(c.d.Ctx)
		same := err == nil || strings.Contains(err.Error(), "start fails")
		harness.Want(t, same, "the retry of a request that fails: %v", err)
	}
}

func (c *trial) checkWitness(t *testing.T) {
	if c.witness == "" {
		return
	}
	sb, err := c.d.Sandboxes.Find(c.witness)
	harness.Check(t, err)
	harness.Want(t, sb.Ready() && c.Made("process", sb.ID), "the other pod is not Ready")
}

func (c *trial) wantAllDown(t *testing.T) {
	for _, sb := range c.d.Sandboxes.List() {
		harness.Want(t, !sb.Ready(), "sandbox %s is Ready after a reboot", sb.ID)
	}
	hasAddress := func() bool {
		return slices.ContainsFunc(c.Leaks(), func(l string) bool { return strings.HasPrefix(l, "address ") })
	}
	c.awaitRetries(func() bool { return !hasAddress() })
	harness.Want(t, !hasAddress(), "an address is not given back after a reboot")
}

// awaitRetries waits until the journal has repeated its DELs.
func (c *trial) awaitRetries(done func() bool) {
	for limit := c.NetworkLimits.RetryMost + c.NetworkLimits.Del; limit > 0 && !done(); limit -= time.Second {
		time.Sleep(time.Second)
	}
}

// removeListed stops and removes each listed pod, at the first try. Ready means that pause lives.
func (c *trial) removeListed(t *testing.T) {
	for _, sb := range c.d.Sandboxes.List() {
		if sb.ID == c.witness {
			continue
		}
		harness.Want(t, !sb.Ready() || c.Made("process", sb.ID), "sandbox %s is Ready without a pause", sb.ID)
		harness.Check(t, c.d.Sandboxes.Stop(c.d.Ctx, sb.ID))
		harness.Check(t, c.d.Sandboxes.Remove(c.d.Ctx, sb.ID))
	}
}

// runAgain: the name is free at once, or leads to the pod whose request was given up. There is one pod of the name.
func (c *trial) runAgain(t *testing.T) {
	id, err := c.d.Sandboxes.Run(c.d.Ctx, c.config, "")
	harness.Check(t, err)
	ready := map[string]bool{}
	for _, sb := range c.d.Sandboxes.List() {
		if sb.Config().GetMetadata().GetName() == "case" {
			ready[sb.ID] = sb.Ready()
		}
	}
	harness.Want(t, maps.Equal(ready, map[string]bool{id: true}), "want %s alone and Ready, got %v", id, ready)
	harness.Check(t, c.d.Sandboxes.Stop(c.d.Ctx, id))
	harness.Check(t, c.d.Sandboxes.Remove(c.d.Ctx, id))
}
