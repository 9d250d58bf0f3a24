package process_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
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
	harness.Want(t, err == nil && !stat.Dead(), "the orphan that lives: %+v, %v", stat, err)
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
			return err == nil && stat.Dead()
		})
	})
}
