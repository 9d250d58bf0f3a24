package client

import (
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
			dead := func() bool {
				stat, err := process.ReadStat(p.pid)
				check(t, err) // it is there until it is waited for
				return stat.Dead()
			}
			if c.lives {
				if dead() {
					t.Error("it was killed")
				}
				return
			}
			for deadline := time.Now().Add(time.Minute); !dead(); time.Sleep(5 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("it lives on")
				}
			}
		})
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
