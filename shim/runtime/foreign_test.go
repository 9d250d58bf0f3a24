package runtime

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
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
