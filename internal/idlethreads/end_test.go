package idlethreads

import (
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	burst = 200
	spare = 8
	// most is what may be left: the spare ones, and a few that the runtime uses.
	most = spare + 8
)

// TestEnd: threads that a burst of system calls has left are gone; those that are in
// one stay, and what they do goes on.
func TestEnd(t *testing.T) {
	release := block(t, burst)
	if End(spare); threads(t) < burst {
		t.Fatalf("%d threads while %d system calls go on", threads(t), burst)
	}
	release()
	if got := threads(t); got < burst {
		t.Fatalf("%d threads after a burst of %d: this shows nothing", got, burst)
	}
	eventuallyFew(t)

	block(t, burst)() // and again: the runtime has not lost count
	eventuallyFew(t)
}

// block begins system calls that wait, each in a goroutine, and returns what ends them.
func block(t *testing.T, n int) (release func()) {
	t.Helper()
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	var begun, ended sync.WaitGroup
	for range n {
		begun.Add(1)
		ended.Go(func() {
			begun.Done()
			_, _ = unix.Read(pipe[0], make([]byte, 1))
		})
	}
	begun.Wait()
	for deadline := time.Now().Add(time.Minute); threads(t) < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d threads, %d system calls", threads(t), n)
		}
	}
	return func() {
		_ = unix.Close(pipe[1])
		ended.Wait()
		_ = unix.Close(pipe[0])
	}
}

// eventuallyFew ends threads until few are left, as who uses End does: it looks again
// and again.
func eventuallyFew(t *testing.T) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for End(spare); threads(t) > most; End(spare) {
		if time.Now().After(deadline) {
			t.Fatalf("%d threads are left, %d at most were to be", threads(t), most)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func threads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(tasks)
}
