package namespace

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// waiter is a program that waits until it is killed, where every user can start it.
func waiter(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("", "network-test-")
	if err == nil {
		err = os.Chmod(directory, 0o755)
	}
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(directory) })
	program := filepath.Join(directory, "waiter")
	must(t, os.WriteFile(program, []byte("#!/bin/sh\nexec /bin/sleep 600\n"), 0o755))
	return program
}

var mapped = []IDMapping{{ContainerID: 0, HostID: 100000, Length: 1000}, {ContainerID: 2000, HostID: 300000, Length: 1}}

func TestHolderThatCannotStart(t *testing.T) {
	if _, err := StartHolder(filepath.Join(t.TempDir(), "missing"), mapped, mapped); err == nil {
		t.Error("started a program that is not there")
	}
	twice := []IDMapping{mapped[0], mapped[0]}
	if _, err := StartHolder(waiter(t), twice, mapped); err == nil {
		t.Error("started with mappings that overlap")
	}
	var none *Holder
	if err := none.End(); err != nil {
		t.Error(err)
	}
}

// A holder that has ended, and whose pid another process has got, leads into no
// foreign namespace: what is pinned is what it was started in.
func TestProperty24_PIDThatIsUsedAgain(t *testing.T) {
	users, networks := newNamespaces(t, "user-"), newNamespaces(t, "net-")
	holder, err := StartHolder(waiter(t), mapped, mapped)
	must(t, err)
	pid := holder.command.Process.Pid
	want := make(map[string]uint64)
	for _, kind := range []string{"user", "net"} {
		want[kind] = inodeOf(t, fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	}
	must(t, unix.Kill(pid, unix.SIGKILL))
	if _, err := unix.Wait4(pid, nil, 0, nil); err != nil { // as who reaps orphans does
		t.Fatal(err)
	}
	foreign := usePIDAgain(t, pid)
	for kind, dir := range map[string]*Dir{"user": users, "net": networks} {
		must(t, holder.Pin(dir, "a", kind))
		if got := inodeOf(t, dir.Path("a")); got != want[kind] {
			t.Errorf("pinned is the %s namespace %d, want %d; that of the process that has its pid is %d",
				kind, got, want[kind], inodeOf(t, fmt.Sprintf("/proc/%d/ns/%s", foreign.Process.Pid, kind)))
		}
	}
	if err := holder.End(); err != nil {
		t.Error(err)
	}
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
		must(t, command.Start())
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
