package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What a SIGCHLD costs a supervisor does not grow with its children: each pod has
// two. That is so with builtin containers alone, where it does nothing, and for a
// sub-reaper, which programs that start containers in the background make it: to look
// for the dead at each one, or to list all children every 20 ms, costs more than twice
// as much as nothing does. Without and with them are measured by turns, and the least
// of each counts: CPU time includes what a hypervisor steals.
func TestASIGCHLDCostsTheSameWithManyPods(t *testing.T) {
	libcontainer, subReaper := newCosts(), newCosts()
	holds := func() bool { return libcontainer.same() && subReaper.same() && subReaper.many <= 2*libcontainer.none }
	for round := 0; round == 0 || round < 5 && !holds(); round++ {
		t.Run(strconv.Itoa(round), func(t *testing.T) { measure(t, libcontainer, subReaper) })
		t.Logf("CPU time of a SIGCHLD with libcontainer: %v; with a sub-reaper: %v", libcontainer, subReaper)
	}
	if !holds() {
		t.Errorf("a SIGCHLD costs more with many pods, with libcontainer: %v; with a sub-reaper: %v", libcontainer, subReaper)
	}
}

const manyPods = 500

func measure(t *testing.T, libcontainer, subReaper *costs) {
	t.Helper()
	builtin, adopter := newChildren(), newChildren()
	running(t, builtin)
	libcontainer.none = min(libcontainer.none, costOfSIGCHLD(t))
	stop := running(t, adopter)
	adopting(t, adopter)
	subReaper.none = min(subReaper.none, costOfSIGCHLD(t))
	for range 2 * manyPods {
		own(t, adopter)
	}
	subReaper.many = min(subReaper.many, costOfSIGCHLD(t))
	stop()
	libcontainer.many = min(libcontainer.many, costOfSIGCHLD(t))
}

// costs are of a SIGCHLD with no pod, and with manyPods.
type costs struct{ none, many time.Duration }

func newCosts() *costs { return &costs{time.Hour, time.Hour} }

func (c *costs) same() bool { return c.many <= 3*c.none/2+10*time.Microsecond }

func (c *costs) String() string {
	return fmt.Sprintf("%v with no pod, %v with %d", c.none, c.many, manyPods)
}

func running(t *testing.T, r *children) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.run(ctx)
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return stop
}

// costOfSIGCHLD is the least CPU time of this process for each, of several hundreds.
func costOfSIGCHLD(t *testing.T) time.Duration {
	t.Helper()
	const times, signals = 5, 200
	least := time.Hour
	for range times {
		before := usedCPU(t)
		for range signals {
			if err := unix.Kill(os.Getpid(), unix.SIGCHLD); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Microsecond)
		}
		least = min(least, (usedCPU(t)-before)/signals)
	}
	return least
}

// libcontainer knows the last child of a start that was cut off late, or not at all.
func TestAFailedStartLeavesNoZombie(t *testing.T) {
	r := newChildren()
	running(t, r)
	own(t, r)
	failed := errors.New("killed")
	for _, command := range [][]string{{"/bin/true"}, {"/bin/sleep", "0.3"}} {
		_, err := r.own(func() (int, error) {
			if _, err := syscall.ForkExec(command[0], command, &syscall.ProcAttr{}); err != nil {
				t.Fatal(err)
			}
			return 0, failed
		})
		if !errors.Is(err, failed) {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(time.Minute); len(listChildren()) > 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("children after a minute: %v, want the one that has an owner", listChildren())
		}
	}
}

// Only a sub-reaper gets what its descendants orphan, and reaps it.
func TestOrphansAreReapedByASubReaper(t *testing.T) {
	r := newChildren()
	running(t, r)
	adopting(t, r)
	own(t, r)
	err := r.during(func() error { return exec.Command("sh", "-c", "sleep 0.2 >/dev/null 2>&1 &").Run() })
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); len(listChildren()) > 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("children after a minute: %v, want the one that has an owner", listChildren())
		}
	}
}

// adopting makes the test a sub-reaper until its end.
func adopting(t *testing.T, r *children) {
	t.Helper()
	r.adopt()
	t.Cleanup(func() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) })
}

// own starts a child that has an owner until the test ends.
func own(t *testing.T, r *children) {
	t.Helper()
	if _, err := r.own(func() (int, error) { return started(t, exec.Command("sleep", "600")), nil }); err != nil {
		t.Fatal(err)
	}
}

func started(t *testing.T, command *exec.Cmd) (pid int) {
	t.Helper()
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	return command.Process.Pid
}

// usedCPU is the CPU time of this process, its own and the kernel's for it.
func usedCPU(t *testing.T) time.Duration {
	t.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
