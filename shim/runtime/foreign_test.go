package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
)

// The program ends by itself when the child that it waits for is killed: what it has
// in the background has no ancestor of ours then.
func TestEndRunEndsWhatTheProgramHasInTheBackground(t *testing.T) {
	for range 20 {
		command := exec.Command("sh", "-c", "sleep 600 & echo $!; sleep 600; exit 1")
		output, err := command.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		var background int
		if _, err := fmt.Fscan(output, &background); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(time.Minute); len(descendants(command.Process.Pid)) < 2 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		held, err := openProcess(background)
		if err != nil {
			t.Fatal(err)
		}
		defer held.Close()
		if err := endRun(command.Process); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		_ = command.Wait()
		if !endsWithin(held, time.Minute) {
			t.Fatal("what the program had in the background lives")
		}
	}
}

// Nor does one live that the program starts while it is being ended, by whichever of its
// threads, as runtimes and shims are programs of Go; also where a fork takes long, because
// processes are moved between cgroups of version 1.
func TestEndRunEndsWhatIsJustBeingStarted(t *testing.T) {
	moving, stop := context.WithCancel(t.Context())
	defer stop()
	for range 3 {
		go func() {
			for ; moving.Err() == nil; time.Sleep(3 * time.Millisecond) {
				cgroup.WarmLock()
			}
		}()
	}
	for name, c := range map[string]struct {
		rounds  int
		program func(mark string) *exec.Cmd
	}{
		"many": {10, func(mark string) *exec.Cmd {
			return exec.Command("sh", "-c", "echo; i=0; while [ $i -lt 300 ]; do sleep "+mark+" & i=$((i+1)); done; wait")
		}},
		"one after the other": {100, forking(t, 0)},
		"by other threads":    {100, forking(t, 3)}, // a child was missed in one of about a hundred rounds
	} {
		t.Run(name, func(t *testing.T) {
			for round := range c.rounds {
				endsWhatIsBeingStarted(t, c.program, fmt.Sprint(86000+round))
			}
		})
	}
}

func endsWhatIsBeingStarted(t *testing.T, program func(mark string) *exec.Cmd, mark string) {
	t.Helper()
	command := program(mark)
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := output.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := endRun(command.Process); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	_ = command.Wait()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left := sleeping(t, mark)
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			for _, p := range left {
				_ = unix.Kill(p, unix.SIGKILL)
			}
			t.Fatalf("%d processes live that the program was starting", len(left))
		}
	}
}

// forking is a program that starts one child after the other, each when it has killed
// the one before: in its only thread, or in others beside the first one.
func forking(t *testing.T, others int) func(mark string) *exec.Cmd {
	t.Helper()
	path := filepath.Join(t.TempDir(), "forking")
	const source = `#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static char *mark;
static void *start(void *_) {
	for (;;) {
		int child = fork();
		if (!child) execlp("sleep", "sleep", mark, (char *)0), _exit(1);
		kill(child, SIGKILL);
		waitpid(child, 0, 0);
	}
}
int main(int count, char **words) {
	pthread_t thread;
	mark = words[1];
	write(1, "\n", 1);
	for (int i = 0; i < OTHERS; i++) pthread_create(&thread, 0, start, 0);
	if (!OTHERS) start(0);
	for (;;) pause();
}
`
	if err := os.WriteFile(path+".c", []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-pthread", "-w", fmt.Sprint("-DOTHERS=", others), "-o", path, path+".c").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return func(mark string) *exec.Cmd { return exec.Command(path, mark) }
}

// sleeping are the processes "sleep MARK", and those that are about to become one: they
// have the mark in what their shell was given.
func sleeping(t *testing.T, mark string) (pids []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if line, err := os.ReadFile(file); err == nil && strings.Contains(string(line), mark) {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func endsWithin(p *Process, limit time.Duration) bool {
	ended := make(chan struct{})
	go func() { // ends with the process
		_ = p.Ended()
		close(ended)
	}()
	select {
	case <-ended:
		return true
	case <-time.After(limit):
		_ = p.Signal(unix.SIGKILL)
		<-ended
		return false
	}
}
