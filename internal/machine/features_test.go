package machine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// Every feature has all that a report shows, and a probe leaves no descriptor.
func TestFeatures(t *testing.T) {
	names := make(map[string]bool)
	before := descriptors(t)
	for _, f := range Features(t.TempDir()) {
		harness.Want(t, f.Name != "" && f.Since != "" && f.Without != "" && f.Probe != nil && !names[f.Name],
			"%+v lacks something, or is there twice", f)
		names[f.Name] = true
		err := f.Probe()
		harness.Want(t, err == nil || !f.Required, "%s: %v, but this project's tests run pods on this machine", f.Name, err)
	}
	harness.Same(t, "descriptors after the probes", descriptors(t), before)
}

// What is said of a feature is what the kernel does when it is used.
func TestRecursiveReadOnlyIsTrue(t *testing.T) {
	dir := t.TempDir()
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	harness.Need(t, err == nil, "open_tree (this test needs root): %v", err)
	defer unix.Close(tree)
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	probed := probeRecursiveReadOnly()
	harness.Want(t, (err == nil) == (probed == nil), "the kernel says %v, the probe %v", err, probed)
}

func descriptors(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	harness.Check(t, err)
	return len(entries)
}

// The probe of mapped owners says yes where they can be mapped, and leaves nothing behind:
// no mount, no file, no process, no descriptor.
func TestProbeUserNamespaces(t *testing.T) {
	root := t.TempDir()
	mounts := harness.Read(t, "/proc/self/mountinfo")
	before := descriptors(t)
	for _, dir := range []string{root, filepath.Join(root, "not", "there")} {
		harness.Same(t, dir, probeUserNamespaces(dir), nil)
	}
	// A file system whose owners cannot be mapped is found out.
	harness.Want(t, probeUserNamespaces("/proc") != nil, "/proc has mapped owners")
	after := harness.Read(t, "/proc/self/mountinfo")
	left, err := os.ReadDir(root)
	children, _ := os.ReadFile("/proc/thread-self/children")
	if now := descriptors(t); err != nil || string(after) != string(mounts) || len(left) > 0 || now != before || strings.TrimSpace(string(children)) != "" {
		t.Errorf("left: files %v (%v), %d descriptors, before %d, processes %s, mounts\n%s\nbefore\n%s", left, err, now, before, children, after, mounts)
	}
}
