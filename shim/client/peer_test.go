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
	"github.com/minicri/minicri/shim/api"
)

// A supervisor that does not answer and does nothing is killed after one question. One
// that works is asked again: it is left alone when it answers at last, and killed when
// it never does.
func TestSupervisorThatWorksIsAskedAgain(t *testing.T) {
	const never = 0
	for name, c := range map[string]struct {
		script    string
		answers   int32 // the question that has an answer
		questions int32
		lives     bool
	}{
		"does nothing":  {"exec sleep 600", never, 1, false},
		"answers late":  {"while :; do :; done", 3, 3, true},
		"answers never": {"while :; do :; done", never, mostQuestions, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			supervisor := exec.Command("sh", "-c", c.script)
			check(t, supervisor.Start())
			defer func() { _, _ = supervisor.Process.Kill(), supervisor.Wait() }()
			fd, err := unix.PidfdOpen(supervisor.Process.Pid, 0)
			check(t, err)
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
					if asked.Add(1) == c.answers {
						_ = connection.Close() // any answer will do
					}
				}
			}()

			p := &peer{dir: dir, answer: new(atomic.Int64), pid: supervisor.Process.Pid, pidfd: os.NewFile(uintptr(fd), "supervisor")}
			defer p.close()
			p.answer.Store(int64(time.Second))
			p.killIfHung()
			if asked.Load() != c.questions {
				t.Errorf("it was asked %d times, want %d", asked.Load(), c.questions)
			}
			if !c.lives {
				awaitDead(t, p.pid)
			} else if dead(t, p.pid) {
				t.Error("it was killed")
			}
		})
	}
}

// A supervisor that hangs is found also when as many connections wait as the kernel
// keeps: it is killed, unless it accepts them at last.
func TestSupervisorThatAcceptsNoConnection(t *testing.T) {
	supervisor := exec.Command("sleep", "600")
	check(t, supervisor.Start())
	defer func() { _, _ = supervisor.Process.Kill(), supervisor.Wait() }()
	pidfd, err := unix.PidfdOpen(supervisor.Process.Pid, 0)
	check(t, err)
	dir, err := os.MkdirTemp("", "peer") // short: a socket's path is bounded
	check(t, err)
	defer os.RemoveAll(dir)
	address := &unix.SockaddrUnix{Name: filepath.Join(dir, api.ControlSocket)}
	listener := streamSocket(t)
	check(t, unix.Bind(listener, address))
	check(t, unix.Listen(listener, 0))
	fillQueue(t, address)

	p := &peer{dir: dir, answer: new(atomic.Int64), pid: supervisor.Process.Pid, pidfd: os.NewFile(uintptr(pidfd), "supervisor")}
	defer p.close()
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
	if dead(t, p.pid) {
		t.Fatal("it was killed although it answers")
	}
	fillQueue(t, address)
	p.answer.Store(int64(200 * time.Millisecond))
	p.killIfHung()
	awaitDead(t, p.pid)
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

func dead(t *testing.T, pid int) bool {
	t.Helper()
	stat, err := process.ReadStat(pid)
	check(t, err) // it is there until it is waited for
	return stat.Dead()
}

func awaitDead(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !dead(t, pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it lives on")
		}
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
