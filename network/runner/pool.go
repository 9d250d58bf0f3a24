package runner

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
)

// pooled is how many cgroups are kept for the runs to come, poolName what their
// names begin with after the mark: to make a cgroup and to remove it takes locks
// of the whole kernel, twice for each plugin run of a pod. More runs at once
// have cgroups of their own.
const (
	pooled   = 4
	poolName = "pool-"
)

// fillPool makes the cgroups of the pool that no run of an earlier daemon has.
func (r *Runner) fillPool(left []*Run) error {
	taken := make(map[string]bool)
	for _, run := range left {
		taken[run.Group.Dir] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	if _, err := os.Stat(r.options.Parent.Dir); errors.Is(err, fs.ErrNotExist) {
		r.parentMade = true
	}
	for i := range pooled {
		group := r.options.Parent.Child(fmt.Sprint(r.options.Mark, poolName, i))
		if taken[group.Dir] {
			continue
		}
		err := group.Make()
		if empty, readErr := group.Empty(); err == nil && empty && readErr == nil {
			r.idle = append(r.idle, group)
		} else {
			errs = append(errs, err, readErr)
		}
	}
	return errors.Join(errs...)
}

// group gives a cgroup to the run of that name.
func (r *Runner) group(name string) cgroup.Group {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := len(r.idle) - 1
	if last < 0 {
		return r.options.Parent.Child(r.options.Mark + name)
	}
	group := r.idle[last]
	r.idle = r.idle[:last]
	return group
}

// giveBack takes the empty cgroup of a run back into the pool, or removes it. One
// that the run changed, or may have frozen, is made anew.
func (r *Runner) giveBack(group cgroup.Group, anew bool) error {
	if !strings.HasPrefix(filepath.Base(group.Dir), r.options.Mark+poolName) {
		return group.Remove()
	}
	if anew || group.Parted() {
		if err := errors.Join(group.Remove(), group.Make()); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return group.Remove()
	}
	r.idle = append(r.idle, group)
	return nil
}

// removeParent removes the parent of the cgroups if this runner made it and
// nothing is in it any more; mu is held.
func (r *Runner) removeParent() error {
	if !r.parentMade {
		return nil
	}
	err := unix.Rmdir(r.options.Parent.Dir)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// awaitEmpty: a process that has been waited for may be inside for some
// microseconds more.
func awaitEmpty(group cgroup.Group) error {
	const tries, pause = 20, 100 * time.Microsecond
	for range tries {
		if empty, err := group.Empty(); err != nil || empty {
			return err
		}
		time.Sleep(pause)
	}
	return fmt.Errorf("cgroup %s: %w", group.Dir, cgroup.ErrBusy)
}
