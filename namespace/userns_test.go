package namespace_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
)

// waiter is a program that waits until it is killed, where every user can start it.
func waiter(t *testing.T) string {
	directory, err := os.MkdirTemp("", "network-test-")
	if err == nil {
		err = os.Chmod(directory, 0o755)
	}
	harness.Check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(directory) })
	program := filepath.Join(directory, "waiter")
	harness.Check(t, os.WriteFile(program, []byte("#!/bin/sh\nexec /bin/sleep 600\n"), 0o755))
	return program
}

var mapped = []namespace.IDMapping{{ContainerID: 0, HostID: 100000, Length: 1000}, {ContainerID: 2000, HostID: 300000, Length: 1}}

func TestHolderThatCannotStart(t *testing.T) {
	_, err := namespace.StartHolder(filepath.Join(t.TempDir(), "missing"), mapped, mapped)
	harness.Want(t, err != nil, "started a program that is not there")
	twice := []namespace.IDMapping{mapped[0], mapped[0]}
	_, err = namespace.StartHolder(waiter(t), twice, mapped)
	harness.Want(t, err != nil, "started with mappings that overlap")
	var none *namespace.Holder
	harness.Check(t, none.End())
}

// A holder that has ended, and whose pid another process has got, leads into no
// foreign namespace: what is pinned is what it was started in.
func TestProperty24_PIDThatIsUsedAgain(t *testing.T) {
	users, networks := newNamespaces(t, "user-"), newNamespaces(t, "net-")
	holder, err := namespace.StartHolder(waiter(t), mapped, mapped)
	harness.Check(t, err)
	pid := holder.PID()
	want := make(map[string]uint64)
	for _, kind := range []string{"user", "net"} {
		want[kind] = inodeOf(t, fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	}
	harness.Check(t, unix.Kill(pid, unix.SIGKILL))
	if _, err := unix.Wait4(pid, nil, 0, nil); err != nil { // as who reaps orphans does
		t.Fatal(err)
	}
	foreign := usePIDAgain(t, pid)
	for kind, dir := range map[string]*namespace.Dir{"user": users, "net": networks} {
		harness.Check(t, holder.Pin(dir, "a", kind))
		if got := inodeOf(t, dir.Path("a")); got != want[kind] {
			t.Errorf("pinned is the %s namespace %d, want %d; that of the process that has its pid is %d",
				kind, got, want[kind], inodeOf(t, fmt.Sprintf("/proc/%d/ns/%s", foreign.Process.Pid, kind)))
		}
	}
	harness.Check(t, holder.End())
}

// usePIDAgain starts a process with the pid, in a network namespace of its own.
func usePIDAgain(t *testing.T, pid int) *exec.Cmd {
	t.Helper()
	const lastPID = "/proc/sys/kernel/ns_last_pid" // pid_namespaces(7)
	for range 1000 {
		if err := os.WriteFile(lastPID, []byte(strconv.Itoa(pid-1)), 0); err != nil {
			t.Skip("the next pid cannot be chosen here:", err)
		}
		command := exec.Command("sleep", "600")
		command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWUSER}
		harness.Check(t, command.Start())
		if command.Process.Pid == pid {
			t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
			return command
		}
		_ = command.Process.Kill()
		_ = command.Wait()
	}
	t.Fatalf("pid %d is not given out again", pid)
	return nil
}
