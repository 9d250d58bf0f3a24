package process

import (
	"context"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func run(t *testing.T) *Parent {
	t.Helper()
	c, err := NewParent()
	must(t, err)
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
func shell(t *testing.T, c *Parent, script string) (*Child, *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { _ = r.Close() })
	child, err := c.Start(func() (int, error) {
		return syscall.ForkExec("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{Files: []uintptr{0, w.Fd(), 2}})
	})
	_ = w.Close()
	must(t, err)
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
	must(t, err)
	if _, err := c.Own(pid, nil); err == nil {
		t.Error("a second owner")
	}
	select {
	case <-child.Exited():
		t.Fatal("reaped while its parent lives")
	case <-time.After(300 * time.Millisecond):
	}
	must(t, syscall.Kill(parent.PID, syscall.SIGKILL))
	if status := child.Wait(); status.ExitStatus() != 7 {
		t.Errorf("status %v, want exit code 7", status)
	}
	if stat := <-seen; !strings.Contains(stat, ") Z ") {
		t.Errorf("before it was reaped it was %q, no zombie", stat)
	}
}

// Orphans are reaped, also beside a child that nobody waits for.
func TestOrphansAreReaped(t *testing.T) {
	c := run(t)
	_, _ = shell(t, c, "exit 1")
	_, out := shell(t, c, `(sleep 0.1; exit 3) & echo $!`)
	orphan := readPID(t, out)
	eventually(t, "the orphan is reaped", func() bool { return !exists(orphan) })
}
