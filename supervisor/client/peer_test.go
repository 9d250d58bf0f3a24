package client

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
)

// A supervisor that does not answer is killed after one question, and one that answers
// lives.
func TestSupervisorIsAskedOnce(t *testing.T) {
	for name, answers := range map[string]bool{"answers": true, "never answers": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "peer") // short: a socket's path is bounded
			check(t, err)
			defer os.RemoveAll(dir)
			listener, err := net.Listen("unix", filepath.Join(dir, api.ControlSocket))
			check(t, err)
			defer listener.Close()
			var asked atomic.Int32
			go func() {
				for {
					connection, err := listener.Accept()
					if err != nil {
						return
					}
					if asked.Add(1); answers {
						_ = connection.Close() // any answer will do
					}
				}
			}()
			p := sleepingPeer(t, dir)
			p.answer.Store(int64(200 * time.Millisecond))
			if answers {
				p.answer.Store(int64(time.Minute))
			}
			p.killIfHung()
			if asked.Load() != 1 {
				t.Errorf("it was asked %d times", asked.Load())
			}
			if !answers {
				if !p.endsWithin(time.Minute) {
					t.Error("it lives on")
				}
			} else if p.endsWithin(10 * time.Millisecond) {
				t.Error("it was killed")
			}
		})
	}
}

// sleepingPeer is a supervisor that only sleeps.
func sleepingPeer(t *testing.T, dir string) *peer {
	t.Helper()
	supervisor := exec.Command("sleep", "600")
	check(t, supervisor.Start())
	sleeps, err := process.Find(supervisor.Process.Pid)
	check(t, err)
	t.Cleanup(func() { _, _, _ = supervisor.Process.Kill(), supervisor.Wait(), sleeps.Close() })
	return &peer{Process: sleeps, dir: dir, answer: new(atomic.Int64)}
}

// A supervisor that hangs is found also when as many connections wait as the kernel
// keeps: it is killed, unless it accepts them at last.
func TestSupervisorThatAcceptsNoConnection(t *testing.T) {
	dir, err := os.MkdirTemp("", "peer") // short: a socket's path is bounded
	check(t, err)
	defer os.RemoveAll(dir)
	address := &unix.SockaddrUnix{Name: filepath.Join(dir, api.ControlSocket)}
	listener := streamSocket(t)
	check(t, unix.Bind(listener, address))
	check(t, unix.Listen(listener, 0))
	fillQueue(t, address)

	p := sleepingPeer(t, dir)
	p.answer.Store(int64(4 * time.Minute))
	accepting := time.AfterFunc(100*time.Millisecond, func() {
		for range 2 { // what fills the queue, and the question
			for {
				if fd, _, err := unix.Accept(listener); err == nil {
					_ = unix.Close(fd) // any answer will do
					break
				}
				time.Sleep(time.Millisecond)
			}
		}
	})
	defer accepting.Stop()
	p.killIfHung()
	if p.endsWithin(10 * time.Millisecond) {
		t.Fatal("it was killed although it answers")
	}
	fillQueue(t, address)
	p.answered = time.Time{}
	p.answer.Store(int64(200 * time.Millisecond))
	p.killIfHung()
	if !p.endsWithin(time.Minute) {
		t.Fatal("it lives on")
	}
	check(t, os.Remove(address.Name))
	if p.silent(time.Minute) {
		t.Error("one that has ended counts as one that is silent")
	}
}

// fillQueue connects until no more connections are kept.
func fillQueue(t *testing.T, address unix.Sockaddr) {
	t.Helper()
	for {
		err := unix.Connect(streamSocket(t), address)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		check(t, err)
	}
}

// streamSocket makes a socket that does not block, and closes it with the test.
func streamSocket(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// endsWithin reports whether a process ends in a time.
func (p *peer) endsWithin(limit time.Duration) bool {
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }() // ends with the process, or when it is closed
	select {
	case err := <-ended:
		return err == nil
	case <-time.After(limit):
		return false
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
