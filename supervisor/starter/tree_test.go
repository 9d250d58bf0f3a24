package starter

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
)

// A supervisor that is killed while it ends a starter leaves that stopped, with what it
// has started: the next one with its directory ends both, and none that is not stopped
// or not its own, nor a process of another cgroup, as those of containers are, that
// calls itself a starter.
func TestEndStopped(t *testing.T) {
	dir := t.TempDir()
	stopped, output := starterOf(t, dir, (*exec.Cmd).Start)
	running, _ := starterOf(t, dir, (*exec.Cmd).Start)
	other, _ := starterOf(t, t.TempDir(), (*exec.Cmd).Start)
	forged, _ := starterOf(t, dir, anotherCgroup(t).Start)
	for _, one := range []*exec.Cmd{stopped, other, forged} {
		if err := one.Process.Signal(unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		for !process.HasStopped(one.Process.Pid) {
			time.Sleep(time.Millisecond)
		}
	}
	EndStopped(dir)
	if _, err := output.ReadByte(); err != io.EOF { // else it never returns
		t.Errorf("what it had started: %v", err)
	}
	if err := stopped.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("the stopped starter: %v", err)
	}
	for name, one := range map[string]*exec.Cmd{"one that works": running, "another supervisor's": other, "a container's": forged} {
		if hasEnded, err := unix.Wait4(one.Process.Pid, nil, unix.WNOHANG, nil); hasEnded != 0 || err != nil {
			t.Errorf("%s: %d, %v", name, hasEnded, err)
		}
	}
}

// anotherCgroup is one below that of this process.
func anotherCgroup(t *testing.T) cgroup.Group {
	t.Helper()
	own, err := cgroup.GroupParent("")
	if err != nil {
		t.Fatal(err)
	}
	group := own.Child(fmt.Sprint("minicri-unit-starter-", os.Getpid()))
	if err := group.Make(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := group.Remove(); err != nil {
			t.Error(err)
		}
	})
	return group
}

// starterOf starts a shell with the arguments and the variable of a starter, and a child of it. Both hold
// the pipe whose reader is returned.
func starterOf(t *testing.T, dir string, start func(*exec.Cmd) error) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	scripts := t.TempDir()
	if err := os.WriteFile(filepath.Join(scripts, Command), []byte("sleep 1000 & echo ready; wait"), 0o600); err != nil {
		t.Fatal(err)
	}
	command := &exec.Cmd{Path: "/bin/sh", Args: arguments(), Dir: scripts, Env: append(os.Environ(), of+"="+dir)}
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := start(command); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if command.ProcessState == nil { // not waited for
			process.KillTree(command.Process.Pid)
			_ = command.Wait()
		}
	})
	reader := bufio.NewReader(output)
	if line, err := reader.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return command, reader
}
