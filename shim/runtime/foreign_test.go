package runtime

import (
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

// Nor does one live that the program starts while it is being ended.
func TestEndRunEndsWhatIsJustBeingStarted(t *testing.T) {
	for round := range 5 {
		mark := fmt.Sprint(86000 + round)
		command := exec.Command("sh", "-c", "echo; i=0; while [ $i -lt 300 ]; do sleep "+mark+" & i=$((i+1)); done; wait")
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
				break
			}
			if time.Now().After(deadline) {
				for _, p := range left {
					_ = unix.Kill(p, unix.SIGKILL)
				}
				t.Fatalf("%d processes live that the program was starting", len(left))
			}
		}
	}
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
