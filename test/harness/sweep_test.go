package harness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The cgroup of a node that has no owner is removed.
func TestSweepCgroups(t *testing.T) {
	all, err := hierarchies()
	check(t, err)
	for _, hierarchy := range all {
		check(t, os.MkdirAll(filepath.Join(hierarchy, cgroupPrefix+"mcr-gone", "below"), 0o755))
	}
	ended := filepath.Join(all[0], cgroupPrefix+"mcr-ended")
	lock, err := makeOwned(ended)
	check(t, err)
	check(t, lock.Close()) // as the kernel does for a process that was killed
	old, young := filepath.Join(all[0], "minicri-unit-sweep-old"), filepath.Join(all[0], "minicri-unit-sweep-young")
	check(t, errors.Join(os.MkdirAll(filepath.Join(old, "below"), 0o755), os.Mkdir(young, 0o755)))
	yesterday := time.Now().AddDate(0, 0, -1)
	check(t, os.Chtimes(old, yesterday, yesterday))

	check(t, SweepCgroups())
	expectAbsent(t, old)
	check(t, os.Remove(young))
	for _, hierarchy := range all {
		expectAbsent(t, filepath.Join(hierarchy, cgroupPrefix+"mcr-gone"))
	}
	expectAbsent(t, ended)
}

// The cgroup of a node that has an owner stays, also when the one that sweeps sees
// nothing else of the node: it is in a mount namespace with another /tmp.
func TestSweepKeepsCgroupsOfOtherMountNamespaces(t *testing.T) {
	n := prepared(t)
	check(t, onThreadOfItsOwn(func() error {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make / private: %w", err)
		}
		if err := unix.Mount("tmpfs", os.TempDir(), "tmpfs", 0, ""); err != nil {
			return fmt.Errorf("hide %s: %w", os.TempDir(), err)
		}
		if _, err := os.Stat(n.Dir); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the node's directory is in sight: %v", err)
		}
		return SweepCgroups()
	}))
	for _, hierarchy := range n.hierarchies() {
		if _, err := os.Stat(filepath.Join(hierarchy, n.CgroupParent)); err != nil {
			t.Errorf("the cgroup of a node that has an owner: %v", err)
		}
	}
}

func expectAbsent(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s stays: %v", path, err)
	}
}
