package namespace

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNamespaceLife(t *testing.T) {
	n := newNamespaces(t, "m-")
	if n.Alive("a") {
		t.Error("alive before it was made")
	}
	ours := inodeOf(t, "/proc/thread-self/ns/net")
	for _, id := range []string{"a", "b"} {
		must(t, n.Create(id))
		if !n.Alive(id) {
			t.Errorf("%s is not alive", id)
		}
	}
	if a, b := inodeOf(t, n.Path("a")), inodeOf(t, n.Path("b")); a == b || a == ours || b == ours {
		t.Errorf("not three namespaces: %d, %d and %d", a, b, ours)
	}
	if now := inodeOf(t, "/proc/thread-self/ns/net"); now != ours {
		t.Error("the caller was moved into a new namespace")
	}
	put(t, filepath.Join(filepath.Dir(n.Path("a")), "anothers"), "")
	if ids, err := n.IDs(); err != nil || !slices.Equal(ids, []string{"a", "b"}) {
		t.Errorf("IDs = %q, %v", ids, err)
	}
	for range 3 { // the second time there is nothing to remove
		must(t, n.Remove("a"))
	}
	wantNoPin(t, n, "a")
	if !n.Alive("b") {
		t.Error("the other namespace is gone, too")
	}
}

func TestRemoveWhatIsMountedTwice(t *testing.T) {
	n := newNamespaces(t, "m-")
	must(t, n.Create("a"))
	for range 2 {
		must(t, unix.Mount("/proc/self/ns/net", n.Path("a"), "none", unix.MS_BIND, ""))
	}
	must(t, n.Remove("a"))
	wantNoPin(t, n, "a")
}

// The directory stays one shared mount however often it is opened, and a pin
// that is removed leaves no copy in mount namespaces that were made meanwhile.
func TestRemoveReachesOtherMountNamespaces(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "namespaces")
	var n *Dir
	for range 3 {
		var err error
		if n, err = Open(directory, "m-"); err != nil {
			t.Fatal(err)
		}
	}
	defer func() { _ = unix.Unmount(directory, unix.MNT_DETACH) }()
	if mounts := mountsBelow(t, directory); len(mounts) != 1 || !strings.Contains(mounts[0], "shared:") {
		t.Errorf("mounted as %q, want once and shared", mounts)
	}
	must(t, n.Create("a"))
	other := exec.Command("unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo ready; cat >/dev/null; cat /proc/self/mountinfo")
	stdin, err := other.StdinPipe()
	must(t, err)
	stdout, err := other.StdoutPipe()
	if err == nil {
		err = other.Start()
	}
	must(t, err)
	buffer := make([]byte, 64<<10)
	if _, err := stdout.Read(buffer); err != nil {
		t.Fatal(err)
	}
	must(t, n.Remove("a"))
	must(t, stdin.Close())
	var seen strings.Builder
	for {
		count, err := stdout.Read(buffer)
		seen.Write(buffer[:count])
		if err != nil {
			break
		}
	}
	must(t, other.Wait())
	if !strings.Contains(seen.String(), directory) || strings.Contains(seen.String(), n.Path("a")) {
		t.Errorf("another mount namespace keeps the pin, or never saw the directory:\n%s", seen.String())
	}
}

// A pin is one mount also where all mounts are shared, as systemd has them.
func TestPinIsOneMount(t *testing.T) {
	shared := t.TempDir()
	for _, err := range []error{unix.Mount(shared, shared, "none", unix.MS_BIND, ""), unix.Mount("", shared, "none", unix.MS_SHARED, "")} {
		must(t, err)
	}
	defer func() { _ = unix.Unmount(shared, unix.MNT_DETACH) }()
	n, err := Open(filepath.Join(shared, "namespaces"), "m-")
	must(t, err)
	must(t, n.Create("a"))
	if mounts := mountsBelow(t, n.Path("a")); len(mounts) != 1 {
		t.Errorf("one pin is %d mounts: %q", len(mounts), mounts)
	}
	must(t, n.Remove("a"))
	wantNoPin(t, n, "a")
}

func inodeOf(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return inode(info)
}

func wantNoPin(t *testing.T, n *Dir, id string) {
	t.Helper()
	if _, err := os.Lstat(n.Path(id)); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", n.Path(id), err)
	}
	if mounts := mountsBelow(t, n.Path(id)); len(mounts) > 0 {
		t.Errorf("still mounted: %q", mounts)
	}
}

func mountsBelow(t *testing.T, path string) (mounts []string) {
	t.Helper()
	data, err := os.ReadFile("/proc/thread-self/mountinfo")
	must(t, err)
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
				if err := errors.Join(n.Create(id), n.Remove(id)); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
	}
	if main := inodeOf(t, "/proc/self/ns/net"); main != ours {
		t.Error("the main thread stays in a namespace of a pod")
	}
	eventually(t, within, "every thread is in the namespace of the node", func() bool {
		threads, err := filepath.Glob("/proc/self/task/*/ns/net")
		if err != nil || len(threads) == 0 {
			t.Fatal(threads, err)
		}
		for _, thread := range threads {
			if info, err := os.Stat(thread); err == nil && inode(info) != ours {
				return false
			}
		}
		return true
	})
}
