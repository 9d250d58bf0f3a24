package client_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
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
	t.Helper()
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil || len(entries) == 0 {
		t.Fatalf("%d descriptors, %v", len(entries), err)
	}
	for _, entry := range entries {
		number, err := strconv.Atoi(entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		if fd, err := unix.PidfdGetfd(pidfd, number, 0); err == nil { // it may be closed by now
			t.Cleanup(func() { _ = unix.Close(fd) })
		}
	}
}

// A supervisor has ended when its process has, whatever other process has copies of its
// sockets and of the file that it has locked.
func TestDeathBesideACopyOfEachDescriptor(t *testing.T) {
	p := startPod(t)
	p.run("c", "while :; do sleep 1; done")
	exec := make(chan error, 1)
	go func() {
		_, err := p.ExecSync(t.Context(), "c", sh("while :; do sleep 1; done"), 0, 10)
		exec <- err
	}()
	for deadline := time.Now().Add(time.Minute); p.shells("c") < 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the command does not run")
		}
	}
	died := p.Client
	copyDescriptors(t, p.pid())
	p.killShim()
	reapOrphans()
	select {
	case err := <-exec:
		if !errdefs.IsUnavailable(err) {
			t.Errorf("a command that the supervisor ran: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("a command that the supervisor ran has no end")
	}
	awaitLost(t, died)
	p.restart()
	if r, err := p.ExecSync(t.Context(), "c", sh("echo hi"), time.Minute, 10); err != nil || string(r.Stdout) != "hi\n" {
		t.Errorf("exec: %+v, %v", r, err)
	}
}

// awaitLost waits until the end of a supervisor is seen.
func awaitLost(t *testing.T, died *client.Client) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := died.List(t.Context()); errors.Is(err, client.ErrLost) {
			return
		} else if time.Now().After(deadline) {
			t.Fatalf("a call to a supervisor that has ended: %v", err)
		}
	}
}

// lines is a log that counts.
type lines struct {
	mu sync.Mutex
	bytes.Buffer
}

// Write is of io.Writer.
func (l *lines) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(line)
}

func (l *lines) count(word string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.String(), word)
}

func newSet(t *testing.T, dir string, log *lines) *client.Set {
	t.Helper()
	set, err := client.NewSet(client.SetOptions{
		Dir: dir, Start: client.StartOptions{Binary: shimBinary, Build: "own"}, Answer: time.Minute, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(set.Close)
	return set
}

// A lock that another process has is named with that process, which is left alone; the
// start is tried again, ever less often.
func TestLockOfAnotherProcess(t *testing.T) {
	dir, log := t.TempDir(), new(lines)
	group := filepath.Join(dir, "own")
	if err := os.Mkdir(group, 0o700); err != nil {
		t.Fatal(err)
	}
	holder := exec.Command(os.Args[0])
	holder.Env = append(os.Environ(), lockEnv+"="+group)
	said, err := holder.StdoutPipe()
	if err == nil {
		err = holder.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = holder.Process.Kill(), holder.Wait() }()
	if _, err := said.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}

	set := newSet(t, dir, log)
	var last error
	const asked = 8 * time.Second
	for began := time.Now(); time.Since(began) < asked; time.Sleep(20 * time.Millisecond) {
		if _, last = set.Ensure(t.Context(), "own"); last == nil {
			t.Fatal("two processes have the lock")
		}
	}
	if want := fmt.Sprint("process ", holder.Process.Pid); !errdefs.IsUnavailable(last) || !strings.Contains(last.Error(), want) {
		t.Errorf("the error does not name %s: %v", want, last)
	}
	if tried := log.count("does not start"); tried < 2 || tried > 8 {
		t.Errorf("%d starts in %v:\n%s", tried, asked, log)
	}
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", holder.Process.Pid)); err != nil || strings.Contains(string(stat), ") Z ") {
		t.Errorf("the other process was ended: %s, %v", stat, err)
	}
	_ = holder.Process.Kill()
	endSupervisor(t, set, "own")
}

// endSupervisor waits until a supervisor serves, and ends it.
func endSupervisor(t *testing.T, set *client.Set, group string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		supervisor, err := set.Ensure(t.Context(), group)
		if err == nil {
			err = supervisor.Shutdown(t.Context())
		}
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// A supervisor that has the lock and that no connection reaches, or whose queue of them is
// full, is ended, and another one takes its place.
func TestLockOfASupervisorThatHangs(t *testing.T) {
	dir, log := t.TempDir(), new(lines)
	set := newSet(t, dir, log)
	first, err := set.Ensure(t.Context(), "own")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := api.LockHolder(filepath.Join(dir, "own"))
	if err != nil || pid == 0 {
		t.Fatalf("process %d has the lock: %v", pid, err)
	}
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "own", api.ControlSocket)); err != nil {
		t.Fatal(err)
	}
	other := newSet(t, dir, log)
	other.SetAnswer(10 * time.Second)
	if _, err := other.Ensure(t.Context(), "own"); err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	if now, err := api.LockHolder(filepath.Join(dir, "own")); err != nil || now == pid || now == 0 {
		t.Errorf("process %d has the lock, it was %d: %v", now, pid, err)
	}
	awaitLost(t, first)
	second, err := other.Ensure(t.Context(), "own")
	if err == nil {
		pid, err = api.LockHolder(filepath.Join(dir, "own"))
	}
	if err != nil {
		t.Fatal(err)
	}
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

// A program that does not start is tried again ever less often, and the log says why it
// did not.
func TestSupervisorThatDoesNotStart(t *testing.T) {
	dir, log := t.TempDir(), new(lines)
	set := newSet(t, dir, log)
	inTheWay := filepath.Join(dir, "own", api.ControlSocket, "directory")
	if err := os.MkdirAll(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	const asked = 5 * time.Second
	var last error
	for began := time.Now(); time.Since(began) < asked; time.Sleep(20 * time.Millisecond) {
		if _, last = set.Ensure(t.Context(), "own"); last == nil {
			t.Fatal("it started")
		}
	}
	if tried := log.count("does not start"); tried < 2 || tried > 7 || log.count("directory not empty") < tried {
		t.Errorf("%d starts in %v, the last error: %v\n%s", tried, asked, last, log)
	}
	if err := os.RemoveAll(filepath.Dir(inTheWay)); err != nil {
		t.Fatal(err)
	}
	endSupervisor(t, set, "own")
}
