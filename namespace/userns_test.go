package namespace

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// waiter is a program that waits until it is killed, where every user can
// start it.
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

// The pod's network namespace is owned by its user namespace, so that root of
// the pod may mount its sysfs; a namespace of the node's is not.
func TestHolder(t *testing.T) {
	networks, users := newNamespaces(t, "net-"), newNamespaces(t, "user-")
	holder, err := StartHolder(waiter(t), mapped, mapped)
	must(t, err)
	if err := holder.Pin(users, "a", "user"); err != nil {
		t.Error(err)
	}
	if err := holder.Pin(networks, "a", "net"); err != nil {
		t.Error(err)
	}
	for range 2 { // the second time there is nothing to end
		if err := holder.End(); err != nil {
			t.Error(err)
		}
	}
	if !users.Alive("a") || !networks.Alive("a") {
		t.Fatal("a namespace went with its holder")
	}
	if owner, want := ownerOf(t, networks.Path("a")), inodeOf(t, users.Path("a")); owner != want {
		t.Errorf("the network namespace is owned by %d, the pod's user namespace is %d", owner, want)
	}
	if ownerOf(t, networks.Path("a")) == inodeOf(t, "/proc/self/ns/user") {
		t.Error("the network namespace is owned by the node")
	}
	if maps := mountSysfs(t, users.Path("a"), networks.Path("a")); maps != "0 100000 1000;2000 300000 1;" {
		t.Errorf("mapped %q", maps)
	}
	must(t, networks.Create("node"))
	if out, err := sysfs(users.Path("a"), networks.Path("node")); err == nil {
		t.Errorf("the sysfs of a namespace of the node's can be mounted: %s", out)
	}
}

// ownerOf is the inode of the user namespace that owns a namespace
// (NS_GET_USERNS, ioctl_ns(2)).
func ownerOf(t *testing.T, path string) uint64 {
	t.Helper()
	file, err := os.Open(path)
	must(t, err)
	defer file.Close()
	owner, err := unix.IoctlRetInt(int(file.Fd()), unix.NS_GET_USERNS)
	must(t, err)
	defer unix.Close(owner)
	var stat unix.Stat_t
	must(t, unix.Fstat(owner, &stat))
	return stat.Ino
}

// mountSysfs mounts sysfs as root of the user namespace and gives its mapping.
func mountSysfs(t *testing.T, users, networks string) (maps string) {
	t.Helper()
	out, err := sysfs(users, networks)
	if err != nil {
		t.Fatalf("mount sysfs: %v: %s", err, out)
	}
	return out
}

func sysfs(users, networks string) (string, error) {
	const script = `mount -t sysfs sysfs /sys && ls /sys/class/net >/dev/null &&
		while read -r inside outside length; do printf '%d %d %d;' $inside $outside $length; done </proc/self/uid_map`
	out, err := exec.Command("nsenter", "--user="+users, "--net="+networks, "unshare", "--mount", "sh", "-c", script).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

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
