package client_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
)

// lockEnv makes the test binary a process that has the lock of a directory.
const lockEnv = "MINICRI_TEST_LOCK"

func holdLock(dir string) {
	if _, err := api.Lock(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("locked")
	time.Sleep(time.Hour)
}

// copyDescriptors has this process have a copy of each descriptor of another one, as a
// child of that has which has not executed its program yet and is stopped.
func copyDescriptors(t *testing.T, pid int) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	harness.Check(t, err)
	defer unix.Close(pidfd)
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	harness.Check(t, err)
	for _, entry := range entries {
		number, err := strconv.Atoi(entry.Name())
		harness.Check(t, err)
		if fd, err := unix.PidfdGetfd(pidfd, number, 0); err == nil { // it may be closed by now
			t.Cleanup(func() { _ = unix.Close(fd) })
		}
	}
}

// A supervisor has ended when its process has, whatever other process has copies of its
// sockets and of the file that it has locked.
func TestDeathBesideACopyOfEachDescriptor(t *testing.T) {
	p := startPod(t)
	p.run("c", stays)
	exec := make(chan error, 1)
	go func() {
		_, err := p.ExecSync(t.Context(), client.ExecOptions{Container: "c", Process: sh(stays)}, 0, 10, new(client.Captured))
		exec <- err
	}()
	p.eventually("the command runs", func() bool { return p.shells("c") == 2 })
	died := p.Client
	copyDescriptors(t, p.pid())
	p.killShim()
	reapOrphans()
	err := <-exec
	harness.Want(t, errdefs.IsUnavailable(err), "a command that the supervisor ran: %v", err)
	awaitLost(t, died)
	p.restart()
	p.wantExec("c", "echo hi", "hi\n")
}

func awaitLost(t *testing.T, died *client.Client) {
	harness.Eventually(t, "the end of a supervisor is seen", func() bool {
		_, err := died.List(t.Context())
		return errors.Is(err, client.ErrLost)
	})
}

func newSet(t *testing.T, dir string, log *harness.Buffer) *client.Set {
	set, err := client.NewSet(client.SetOptions{
		Dir: dir, Start: client.StartOptions{Binary: shimBinary, Build: "own"}, Answer: time.Minute, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	harness.Check(t, err)
	t.Cleanup(set.Close)
	return set
}

// A program that does not start is tried again, the error says why, and the
// log as often as it was tried; with its reason gone it starts. A lock that another process
// has is named with that process, which is left alone.
func TestSupervisorThatDoesNotStart(t *testing.T) {
	for name, inTheWay := range harness.Sorted(map[string]func(t *testing.T, group string) (why string, gone func()){
		"a directory": func(t *testing.T, group string) (string, func()) {
			socket := filepath.Join(group, api.ControlSocket)
			harness.Check(t, os.MkdirAll(socket+"/directory", 0o700))
			return "directory not empty", func() { harness.Check(t, os.RemoveAll(socket)) }
		},
		"a lock": func(t *testing.T, group string) (string, func()) {
			holder := exec.Command(os.Args[0])
			holder.Env = append(os.Environ(), lockEnv+"="+group)
			said, err := holder.StdoutPipe()
			harness.Check(t, errors.Join(err, holder.Start()))
			_, err = said.Read(make([]byte, 1))
			harness.Check(t, err)
			return fmt.Sprint("process ", holder.Process.Pid), func() {
				state := processState(holder.Process.Pid)
				harness.Want(t, state != "" && state != "Z", "the other process was ended")
				_, _ = holder.Process.Kill(), holder.Wait()
			}
		},
	}) {
		t.Run(name, func(t *testing.T) {
			dir, log := t.TempDir(), new(harness.Buffer)
			group := filepath.Join(dir, "own")
			harness.Check(t, os.Mkdir(group, 0o700))
			why, gone := inTheWay(t, group)
			set := newSet(t, dir, log)
			tried := 0
			harness.Eventually(t, "it is tried three times", func() bool {
				_, err := set.Ensure(t.Context(), "own")
				harness.WantError(t, err, why)
				harness.Want(t, errdefs.IsUnavailable(err), "%v", err)
				tried = strings.Count(log.String(), "does not start")
				return tried >= 3
			})
			harness.Want(t, strings.Count(log.String(), why) >= tried, "%d starts:\n%s", tried, log)
			gone()
			endSupervisor(t, set, "own")
		})
	}
}

// endSupervisor waits until a supervisor serves, and ends it.
func endSupervisor(t *testing.T, set *client.Set, group string) {
	harness.Eventually(t, "a supervisor serves", func() bool {
		supervisor, err := set.Ensure(t.Context(), group)
		return err == nil && supervisor.Shutdown(t.Context()) == nil
	})
}

// Who follows a set after it was asked for a supervisor, as a daemon's undo of a pod may have been, is told of ends.
func TestFollowedLate(t *testing.T) {
	set := newSet(t, t.TempDir(), new(harness.Buffer))
	defer endSupervisor(t, set, "own")
	supervisor, err := set.Ensure(t.Context(), "own")
	harness.Check(t, err)
	told := make(ends, 10)
	p := &pod{t: t, dir: set.Dir("own"), held: make(map[string]*client.Held), Client: supervisor}
	p.run("c", "exit 3")
	set.Follow(told)
	_, err = set.Ensure(t.Context(), "own")
	harness.Check(t, err)
	e := <-told
	harness.Want(t, e.GetId() == "c" && e.GetExit().GetCode() == 3, "told of %v", e)
	p.check(p.Delete(t.Context(), "c", true))
}

// ends receives containers that have ended.
type ends chan *api.Container

func (c ends) Noted(event *api.Event) {
	if event.GetContainer().GetExit() != nil {
		c <- event.GetContainer()
	}
}
func (c ends) Missed(string, *client.Client) {}
func (c ends) Lost(string, error)            {}

// A supervisor that has the lock and that no connection reaches, or whose queue of them is
// full, is ended, and another one takes its place.
func TestLockOfASupervisorThatHangs(t *testing.T) {
	dir, log := t.TempDir(), new(harness.Buffer)
	first, err := newSet(t, dir, log).Ensure(t.Context(), "own")
	harness.Check(t, err)
	pid, err := api.LockHolder(filepath.Join(dir, "own"))
	harness.Check(t, errors.Join(err, unix.Kill(pid, unix.SIGSTOP), os.Remove(filepath.Join(dir, "own", api.ControlSocket))))
	other := newSet(t, dir, log)
	other.SetAnswer(10 * time.Second)
	_, err = other.Ensure(t.Context(), "own")
	harness.Need(t, err == nil, "%v\n%s", err, log)
	now, err := api.LockHolder(filepath.Join(dir, "own"))
	harness.Need(t, err == nil, "process %d has the lock, it was %d: %v", now, pid, err)
	harness.Want(t, now != pid, "process %d has the lock, it was %d: %v", now, pid, err)
	harness.Want(t, now != 0, "process %d has the lock, it was %d: %v", now, pid, err)
	awaitLost(t, first)
	second, err := other.Ensure(t.Context(), "own")
	if err == nil {
		pid, err = api.LockHolder(filepath.Join(dir, "own"))
	}
	harness.Check(t, err)
	_ = unix.Kill(pid, unix.SIGSTOP)
	for err == nil { // until its queue is full: that of no question is accepted
		var conn net.Conn
		if conn, err = net.Dial("unix", filepath.Join(dir, "own", api.ControlSocket)); err == nil {
			defer conn.Close()
		}
	}
	awaitLost(t, second)
	endSupervisor(t, other, "own")
}

// What a supervisor logs is in the daemon's log, once, with its level, also what it
// logged while there was no daemon; and its file does not grow.
func TestLogIsPassedOn(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "build", client.Log)
	harness.Check(t, os.Mkdir(filepath.Dir(path), 0o700))
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	harness.Check(t, err)
	defer file.Close()
	for range 2 {
		for said := range 3000 { // more than is kept
			fmt.Fprintf(file, "time=2026-11-23T00:00:00Z level=WARN msg=\"line %d of some hundred bytes\" container=%s\n", said, strings.Repeat("c", 64))
		}
		fmt.Fprintln(file, `time="2026-11-23T00:00:00Z" level=error msg="failed sending message on channel"`)
		fmt.Fprintln(file, "panic: it fails")
		var daemon harness.Buffer
		set := newSet(t, dir, &daemon)
		const last = `level=ERROR msg=supervisor build=build said="panic: it fails"`
		harness.Eventually(t, "all is passed on", func() bool { return strings.Contains(daemon.String(), last) })
		set.Close()
		n := strings.Count(daemon.String(), `level=WARN msg=supervisor build=build said="msg=\"line `)
		harness.Want(t, n == 3000, "%d of 3000 lines, %.300s", n, daemon.String())
		harness.Want(t, !strings.Contains(daemon.String(), "failed sending"), "what a library says is not for debugging alone")
	}
	var info unix.Stat_t
	harness.Check(t, unix.Stat(path, &info))
	kept := info.Blocks * 512
	harness.Want(t, kept <= 300<<10 && info.Size >= 600<<10, "of a log of %d bytes %d are kept", info.Size, kept)
}
