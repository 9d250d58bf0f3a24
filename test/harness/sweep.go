package harness

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// cgroupPrefix is what the parent cgroups of nodes begin with; the name of the
// node's directory follows.
const cgroupPrefix = "minicri-tests-"

// A cgroup's owner holds a lock on its directory (flock(2)), which the kernel
// releases with the process. Whoever sees the cgroup sees the lock, also in another
// mount or process namespace.

// makeOwned makes a cgroup that this process owns until the file is closed.
func makeOwned(dir string) (*os.File, error) {
	// Nobody sweeps between the two.
	sweeps, err := locked(filepath.Dir(dir), unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	defer sweeps.Close()
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	return locked(dir, unix.LOCK_EX|unix.LOCK_NB)
}

// locked opens a directory and locks it as flock(2) does.
func locked(dir string, how int) (*os.File, error) {
	file, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(file.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), file.Close())
	}
	return file, nil
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
		errs = append(errs, sweep(hierarchy))
	}
	return errors.Join(errs...)
}

func sweep(hierarchy string) error {
	others, err := locked(hierarchy, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer others.Close()
	parents, err := filepath.Glob(filepath.Join(hierarchy, cgroupPrefix+"*"))
	errs := []error{err}
	for _, parent := range parents {
		owner, err := locked(parent, unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK), errors.Is(err, fs.ErrNotExist):
			continue // it has an owner, or has just been removed by it
		case err != nil:
			errs = append(errs, err)
			continue
		}
		errs = append(errs, killAll(parent), removeCgroup(parent), owner.Close())
	}
	sweepOld(hierarchy)
	return errors.Join(errs...)
}

// sweepOld removes the cgroups of tests of packages, which have no owner, once nothing
// runs in them and nothing was made in them for longer than a test may take.
func sweepOld(hierarchy string) {
	const longest = 2 * time.Hour
	for _, pattern := range []string{"minicri-unit-*", "minicri-launch-*", "minicri-release-test"} {
		roots, _ := filepath.Glob(filepath.Join(hierarchy, pattern))
		for _, root := range roots {
			if info, err := os.Stat(root); err != nil || time.Since(info.ModTime()) < longest {
				continue
			}
			dirs, _ := cgroupTree(root)
			for _, dir := range dirs {
				_ = os.Remove(dir) // what runs there keeps it
			}
		}
	}
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
