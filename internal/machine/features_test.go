package machine

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Every feature has all that a report shows, and a probe leaves no descriptor.
func TestFeatures(t *testing.T) {
	names := make(map[string]bool)
	before := descriptors(t)
	for _, f := range Features() {
		if f.Name == "" || f.Since == "" || f.Without == "" || f.Probe == nil || names[f.Name] {
			t.Errorf("%+v lacks something, or is there twice", f)
		}
		names[f.Name] = true
		if err := f.Probe(); err != nil && f.Required {
			t.Errorf("%s: %v, but this project's tests run pods on this machine", f.Name, err)
		}
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before the probes, %d after", before, after)
	}
}

// What is said of a feature is what the kernel does when it is used.
func TestRecursiveReadOnlyIsTrue(t *testing.T) {
	dir := t.TempDir()
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatalf("open_tree (this test needs root): %v", err)
	}
	defer unix.Close(tree)
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	if probed := probeRecursiveReadOnly(); (err == nil) != (probed == nil) {
		t.Errorf("the kernel says %v, the probe %v", err, probed)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
