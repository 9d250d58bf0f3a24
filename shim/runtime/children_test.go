package runtime

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What a SIGCHLD costs a supervisor does not grow with its children: each pod has
// two. That is so with builtin containers alone, and for a sub-reaper, which
// programs that start containers in the background make it.
func TestASIGCHLDCostsTheSameWithManyPods(t *testing.T) {
	const pods = 500
	builtin, adopter := newChildren(), newChildren()
	running(t, builtin)
	noPod := costOfSIGCHLD(t)
	stop := running(t, adopter)
	adopting(t, adopter)
	noPodAdopting := costOfSIGCHLD(t)
	for range 2 * pods {
		own(t, adopter)
	}
	check := func(how string, none, many time.Duration) {
		t.Logf("%s: CPU time of a SIGCHLD %v with no pod, %v with %d", how, none, many, pods)
		if most := 3*none/2 + 10*time.Microsecond; many > most {
			t.Errorf("%s: a SIGCHLD costs %v with %d pods, want at most %v: it costs %v with none", how, many, pods, most, none)
		}
	}
	check("sub-reaper", noPodAdopting, costOfSIGCHLD(t))
	stop()
	check("libcontainer", noPod, costOfSIGCHLD(t))
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

// costOfSIGCHLD is the CPU time of this process for each of many.
func costOfSIGCHLD(t *testing.T) time.Duration {
	t.Helper()
	const signals = 1000
	before := usedCPU(t)
	for range signals {
		if err := unix.Kill(os.Getpid(), unix.SIGCHLD); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Microsecond)
	}
	return (usedCPU(t) - before) / signals
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
	for deadline := time.Now().Add(20 * time.Second); len(listChildren()) > 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("children after 20 s: %v, want the one that has an owner", listChildren())
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
	for deadline := time.Now().Add(20 * time.Second); len(listChildren()) > 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("children after 20 s: %v, want the one that has an owner", listChildren())
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
