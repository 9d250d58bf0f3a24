package process_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

func readPID(t *testing.T, from io.Reader) (pid int) {
	_, err := fmt.Fscan(from, &pid)
	harness.Check(t, err)
	return pid
}

// reaping runs the reaper of orphans for as long as the test takes.
func reaping(t *testing.T) {
	t.Helper()
	harness.Check(t, process.Adopt())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		process.ReapOrphans(ctx, nil)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(within):
			t.Error("ReapOrphans does not end with its context")
		}
	})
}

// A grandchild whose parent has gone becomes ours, and when it ends, with
// no parent that waits for it, it is reaped; one that lives is left alone.
func TestReapOrphans(t *testing.T) {
	reaping(t)
	out, err := exec.Command("sh", "-c", `
		sleep 600 >/dev/null 2>&1 & echo $!
		sleep 60 >/dev/null 2>&1 & echo $!`).Output()
	harness.Check(t, err)
	output := strings.NewReader(string(out))
	short, long := open(t, factsOf(t, readPID(t, output))), open(t, factsOf(t, readPID(t, output)))
	t.Cleanup(func() { _ = long.Kill(within) })
	for _, orphan := range []*process.Process{short, long} {
		stat, err := process.ReadStat(orphan.PID)
		harness.Need(t, err == nil && stat.Parent == os.Getpid(), "an orphan has not been adopted: %+v, %v", stat, err)
	}
	began := time.Now()
	harness.Check(t, errors.Join(unix.Kill(short.PID, unix.SIGKILL), short.Wait()))
	harness.Want(t, exists(short.PID) || time.Since(began) >= process.ReapAfter, "reaped at once: another waiter would have had no time to")
	harness.Eventually(t, "the dead orphan is reaped", within, func() bool { return !exists(short.PID) })
	stat, err := process.ReadStat(long.PID)
	harness.Want(t, err == nil && stat.State != 'Z', "the orphan that lives: %+v, %v", stat, err)
}

// The exit status of a child that other code waits for is never taken from it,
// however many children end at once and whatever orphans end beside them.
func TestReapOrphansLeavesChildrenToTheirWaiters(t *testing.T) {
	reaping(t)
	began := time.Now()
	for n := 0; time.Since(began) < process.ReapAfter+500*time.Millisecond; n++ {
		status := n % 200
		command := exec.Command("sh", "-c", fmt.Sprintf("sleep 0.01 >/dev/null 2>&1 & exit %d", status))
		err := command.Run()
		var exit *exec.ExitError
		switch {
		case status == 0 && err != nil:
			t.Fatalf("run %d: %v", n, err)
		case status != 0 && (!errors.As(err, &exit) || exit.ExitCode() != status):
			t.Fatalf("run %d: %v, want exit status %d", n, err, status)
		}
	}
	harness.Eventually(t, "every orphan is reaped", within, func() bool {
		return !slices.ContainsFunc(process.Children("self"), func(pid int) bool {
			stat, err := process.ReadStat(pid)
			return err == nil && stat.State == 'Z'
		})
	})
}

func run(t *testing.T) *process.Parent {
	c, err := process.NewParent()
	harness.Check(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		c.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-over
	})
	return c
}

// shell starts a shell with its output in a pipe.
func shell(t *testing.T, c *process.Parent, script string) (*process.Child, *os.File) {
	r, w, err := os.Pipe()
	harness.Check(t, err)
	t.Cleanup(func() { _ = r.Close() })
	child, err := c.Start(func() (int, error) {
		return syscall.ForkExec("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{Files: []uintptr{0, w.Fd(), 2}})
	})
	_ = w.Close()
	harness.Check(t, err)
	return child, r
}

// A process that a child of ours has made, and that ends before its parent does.
func TestOwnedBeforeItsParentEnds(t *testing.T) {
	c := run(t)
	parent, out := shell(t, c, `sh -c 'sleep 0.1; exit 7' & echo $!; exec sleep 1000`)
	pid := readPID(t, out)
	seen := make(chan string, 1)
	child, err := c.Own(pid, func(int) {
		stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		seen <- string(stat)
	})
	harness.Check(t, err)
	_, err = c.Own(pid, nil)
	harness.Want(t, err != nil, "a second owner")
	select {
	case <-child.Exited():
		t.Fatal("reaped while its parent lives")
	case <-time.After(300 * time.Millisecond):
	}
	harness.Check(t, syscall.Kill(parent.PID, syscall.SIGKILL))
	status := child.Wait()
	harness.Want(t, status.ExitStatus() == 7, "status %v, want exit code 7", status)
	stat := <-seen
	harness.Want(t, strings.Contains(stat, ") Z "), "before it was reaped it was %q, no zombie", stat)
}

// Orphans are reaped, also beside a child that nobody waits for.
func TestOrphansAreReaped(t *testing.T) {
	c := run(t)
	_, _ = shell(t, c, "exit 1")
	_, out := shell(t, c, `(sleep 0.1; exit 3) & echo $!`)
	orphan := readPID(t, out)
	harness.Eventually(t, "the orphan is reaped", within, func() bool { return !exists(orphan) })
}
