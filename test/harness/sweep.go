package harness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// cgroupPrefix is what the parent cgroups of nodes begin with; the name of the
// node's directory follows.
const cgroupPrefix = "minicri-test-"

// lockAlive locks a file in the node's directory. The kernel releases the lock
// with this process (flock(2)), so that who comes later knows whether the node
// still has an owner.
func lockAlive(dir string) (*os.File, error) {
	file, err := os.OpenFile(aliveFile(dir), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", file.Name(), err), file.Close())
	}
	return file, nil
}

func aliveFile(dir string) string { return filepath.Join(dir, "alive") }

// dead reports whether no process owns the node with this directory: it is gone,
// or its lock is free. A directory without a lock file is being made.
func dead(dir string) bool {
	if _, err := os.Stat(dir); err != nil {
		return os.IsNotExist(err)
	}
	file, err := os.OpenFile(aliveFile(dir), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer file.Close()
	return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}

// SweepCgroups removes the cgroups of nodes whose test was killed, with the
// processes in them: namespaces, mounts and processes end with hack/in-netns,
// cgroups do not.
func SweepCgroups() error {
	hierarchies, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, hierarchy := range hierarchies {
		parents, err := filepath.Glob(filepath.Join(hierarchy, cgroupPrefix+"*"))
		errs = append(errs, err)
		for _, parent := range parents {
			if dead(filepath.Join(os.TempDir(), strings.TrimPrefix(filepath.Base(parent), cgroupPrefix))) {
				errs = append(errs, killAll(parent), removeCgroup(parent))
			}
		}
	}
	return errors.Join(errs...)
}

func hierarchies() (mountpoints []string, err error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	for _, m := range mounts {
		mountpoints = append(mountpoints, m.Mountpoint)
	}
	return mountpoints, nil
}
