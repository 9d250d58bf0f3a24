package namespace_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/isolate"
)

func TestNamespaceLife(t *testing.T) {
	n := newNamespaces(t, "m-")
	harness.Want(t, !n.Alive("a"), "alive before it was made")
	ours := inodeOf(t, "/proc/thread-self/ns/net")
	for _, id := range []string{"a", "b"} {
		harness.Check(t, n.Create(id))
		harness.Want(t, n.Alive(id), "%s is not alive", id)
	}
	a, b := inodeOf(t, n.Path("a")), inodeOf(t, n.Path("b"))
	harness.Want(t, a != b, "not three namespaces: %d, %d and %d", a, b, ours)
	harness.Want(t, a != ours, "not three namespaces: %d, %d and %d", a, b, ours)
	harness.Want(t, b != ours, "not three namespaces: %d, %d and %d", a, b, ours)
	harness.Same(t, "the caller was moved into a new namespace", inodeOf(t, "/proc/thread-self/ns/net"), ours)
	put(t, filepath.Join(filepath.Dir(n.Path("a")), "anothers"), "")
	ids, err := n.IDs()
	harness.Want(t, err == nil && slices.Equal(ids, []string{"a", "b"}), "IDs = %q, %v", ids, err)
	for range 3 { // the second time there is nothing to remove
		harness.Check(t, n.Remove("a"))
	}
	wantNoPin(t, n, "a")
	harness.Want(t, n.Alive("b"), "the other namespace is gone, too")
}

func TestRemoveWhatIsMountedTwice(t *testing.T) {
	n := newNamespaces(t, "m-")
	harness.Check(t, n.Create("a"))
	for range 2 {
		harness.Check(t, unix.Mount("/proc/self/ns/net", n.Path("a"), "none", unix.MS_BIND, ""))
	}
	harness.Check(t, n.Remove("a"))
	wantNoPin(t, n, "a")
}

// The directory stays one shared mount however often it is opened, and a pin
// that is removed leaves no copy in mount namespaces that were made meanwhile.
func TestRemoveReachesOtherMountNamespaces(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "namespaces")
	var n *namespace.Dir
	for range 3 {
		var err error
		n, err = namespace.Open(directory, "m-")
		harness.Need(t, err == nil, "%v", err)
	}
	defer func() { _ = unix.Unmount(directory, unix.MNT_DETACH) }()
	mounts := mountsBelow(t, directory)
	harness.Want(t, len(mounts) == 1 && strings.Contains(mounts[0], "shared:"), "mounted as %q, want once and shared", mounts)
	harness.Check(t, n.Create("a"))
	other := exec.Command("unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo ready; cat >/dev/null; cat /proc/self/mountinfo")
	stdin, err := other.StdinPipe()
	harness.Check(t, err)
	stdout, err := other.StdoutPipe()
	if err == nil {
		err = other.Start()
	}
	harness.Check(t, err)
	buffer := make([]byte, 64<<10)
	_, err = stdout.Read(buffer)
	harness.Check(t, err)
	harness.Check(t, n.Remove("a"))
	harness.Check(t, stdin.Close())
	var seen strings.Builder
	for {
		count, err := stdout.Read(buffer)
		seen.Write(buffer[:count])
		if err != nil {
			break
		}
	}
	harness.Check(t, other.Wait())
	harness.Want(t, strings.Contains(seen.String(), directory) && !strings.Contains(seen.String(), n.Path("a")),
		"another mount namespace keeps the pin, or never saw the directory:\n%s", seen.String())
}

// A pin is one mount also where all mounts are shared, as systemd has them.
func TestPinIsOneMount(t *testing.T) {
	shared := t.TempDir()
	for _, err := range []error{unix.Mount(shared, shared, "none", unix.MS_BIND, ""), unix.Mount("", shared, "none", unix.MS_SHARED, "")} {
		harness.Check(t, err)
	}
	defer func() { _ = unix.Unmount(shared, unix.MNT_DETACH) }()
	n, err := namespace.Open(filepath.Join(shared, "namespaces"), "m-")
	harness.Check(t, err)
	harness.Check(t, n.Create("a"))
	mounts := mountsBelow(t, n.Path("a"))
	harness.Want(t, len(mounts) == 1, "one pin is %d mounts: %q", len(mounts), mounts)
	harness.Check(t, n.Remove("a"))
	wantNoPin(t, n, "a")
}

func inodeOf(t *testing.T, path string) uint64 {
	info, err := os.Stat(path)
	harness.Check(t, err)
	return inode(info)
}

func wantNoPin(t *testing.T, n *namespace.Dir, id string) {
	_, err := os.Lstat(n.Path(id))
	harness.Want(t, os.IsNotExist(err), "%s is still there: %v", n.Path(id), err)
	harness.Same(t, "still mounted", mountsBelow(t, n.Path(id)), nil)
}

func mountsBelow(t *testing.T, path string) (mounts []string) {
	data := harness.Read(t, "/proc/thread-self/mountinfo")
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, " "+path) {
			mounts = append(mounts, line)
		}
	}
	return mounts
}

// No thread stays behind in a namespace: it would outlive its removal. The
// main thread would, because the Go runtime never ends it.
func TestCreateLeavesNoThreadBehind(t *testing.T) {
	n := newNamespaces(t, "m-")
	ours := inodeOf(t, "/proc/thread-self/ns/net")
	for range 20 {
		var wait sync.WaitGroup
		for i := range 10 {
			wait.Go(func() {
				id := strconv.Itoa(i)
				harness.Same(t, id, errors.Join(n.Create(id), n.Remove(id)), nil)
			})
		}
		wait.Wait()
	}
	harness.Same(t, "the main thread stays in a namespace of a pod", inodeOf(t, "/proc/self/ns/net"), ours)
	harness.Eventually(t, "every thread is in the namespace of the node", func() bool {
		threads, err := filepath.Glob("/proc/self/task/*/ns/net")
		harness.Need(t, err == nil && len(threads) != 0, "%v, %v", threads, err)
		for _, thread := range threads {
			if info, err := os.Stat(thread); err == nil && inode(info) != ours {
				return false
			}
		}
		return true
	})
}

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

var mapped = []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 1000}, {ContainerID: 2000, HostID: 300000, Size: 1}}

func TestHolderThatCannotStart(t *testing.T) {
	_, err := namespace.StartHolder(filepath.Join(t.TempDir(), "missing"), mapped, mapped)
	harness.Want(t, err != nil, "started a program that is not there")
	twice := []specs.LinuxIDMapping{mapped[0], mapped[0]}
	_, err = namespace.StartHolder(waiter(t), twice, mapped)
	harness.Want(t, err != nil, "started with mappings that overlap")
	var none *namespace.Holder
	harness.Check(t, none.End())
}

// A holder that has ended, and whose pid another process has got, leads into no
// foreign namespace: what is pinned is what it was started in.
func TestProperty24_PIDThatIsUsedAgain(t *testing.T) {
	for tries := 0; !usedAgain(t); tries++ {
		harness.Need(t, tries < 10, "the pid is not given out again")
	}
}

func usedAgain(t *testing.T) bool {
	users, networks := newNamespaces(t, "user-"), newNamespaces(t, "net-")
	holder, err := namespace.StartHolder(waiter(t), mapped, mapped)
	harness.Check(t, err)
	pid := holder.PID()
	want := make(map[string]uint64)
	for _, kind := range []string{"user", "net"} {
		want[kind] = inodeOf(t, fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	}
	harness.Check(t, unix.Kill(pid, unix.SIGKILL))
	_, err = unix.Wait4(pid, nil, 0, nil) // as who reaps orphans does
	harness.Check(t, err)
	foreign := usePIDAgain(t, pid)
	if foreign == nil {
		harness.Check(t, holder.End())
		return false
	}
	for kind, dir := range map[string]*namespace.Dir{"user": users, "net": networks} {
		harness.Check(t, dir.Pin("a", holder.Namespace(kind)))
		if got := inodeOf(t, dir.Path("a")); got != want[kind] {
			t.Errorf("pinned is the %s namespace %d, want %d; that of the process that has its pid is %d",
				kind, got, want[kind], inodeOf(t, fmt.Sprintf("/proc/%d/ns/%s", foreign.Process.Pid, kind)))
		}
	}
	harness.Check(t, holder.End())
	return true
}

// usePIDAgain starts a process with the pid, in a network namespace of its own; nil where another package's process has it.
func usePIDAgain(t *testing.T, pid int) *exec.Cmd {
	t.Helper()
	const lastPID = "/proc/sys/kernel/ns_last_pid" // pid_namespaces(7)
	for range 100 {
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
	return nil
}

// TestMain keeps the mounts that the tests make away from the machine.
func TestMain(m *testing.M) { os.Exit(isolate.Run(m, nil)) }

func newNamespaces(t *testing.T, mark string) *namespace.Dir {
	directory := filepath.Join(t.TempDir(), "namespaces")
	namespaces, err := namespace.Open(directory, mark)
	harness.Check(t, err)
	t.Cleanup(func() {
		ids, err := namespaces.IDs()
		for _, id := range ids {
			err = errors.Join(err, namespaces.Remove(id))
		}
		harness.Check(t, errors.Join(err, unix.Unmount(directory, unix.MNT_DETACH)))
	})
	return namespaces
}

func put(t *testing.T, path, text string) { harness.Check(t, os.WriteFile(path, []byte(text), 0o600)) }

func inode(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Ino }
