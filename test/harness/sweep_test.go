package harness

import (
	"os"
	"path/filepath"
	"testing"
)

// The cgroup of a node that has no owner is removed, that of one that has stays.
func TestSweepCgroups(t *testing.T) {
	n := prepared(t)
	all, err := hierarchies()
	check(t, err)
	gone := filepath.Join(all[0], cgroupPrefix+"mcr-gone")
	check(t, os.MkdirAll(filepath.Join(gone, "below"), 0o755))
	killed, err := os.MkdirTemp("", "mcr")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(killed)) })
	lock, err := lockAlive(killed)
	check(t, err)
	check(t, lock.Close()) // as the kernel does for a process that was killed
	left := filepath.Join(all[0], cgroupPrefix+filepath.Base(killed))
	check(t, os.Mkdir(left, 0o755))
	owned := filepath.Join(all[0], n.CgroupParent)

	check(t, SweepCgroups())
	for _, path := range []string{gone, left} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s stays: %v", path, err)
		}
	}
	if CgroupDriver() == "systemd" {
		return // slices are systemd's, which ends them
	}
	if _, err := os.Stat(owned); err != nil {
		t.Errorf("the cgroup of a node that has an owner: %v", err)
	}
}
