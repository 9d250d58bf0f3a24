package process_test

import (
	"context"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

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
