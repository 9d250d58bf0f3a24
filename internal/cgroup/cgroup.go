// Package cgroup finds, empties and removes the cgroups of pods.
//
// It keeps no state. Launches and libcontainer make the cgroups of pods; this package
// makes those of plugin runs. The path of each follows from the id of its pod or
// container, so what is left of one can be found in every hierarchy without
// asking the process. Both versions are covered: on v1 (cgroups(7)) a path stands
// once in each mounted hierarchy, on v2 once in all.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"
)

// Hierarchies are the mount points of all cgroup hierarchies of the machine.
type Hierarchies []string

// FindHierarchies reads them from the mount table.
func FindHierarchies() (Hierarchies, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	var found Hierarchies
	seen := make(map[string]bool)
	for _, m := range mounts {
		hierarchy := m.Major<<20 | m.Minor
		key := fmt.Sprint(hierarchy, m.Root)
		if !seen[key] {
			seen[key] = true
			found = append(found, m.Mountpoint)
		}
	}
	if len(found) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted: mount cgroup2 on /sys/fs/cgroup")
	}
	return found, nil
}

// Unified reports whether the machine has version 2 alone.
func Unified() bool { return cgroups.IsCgroup2UnifiedMode() }

// Path turns the path of runtime-spec into the path below a hierarchy:
// slice:prefix:name is where systemd puts the scope prefix-name.scope.
func Path(cgroupsPath string) string {
	parts := strings.Split(cgroupsPath, ":")
	if len(parts) != 3 {
		return cgroupsPath
	}
	return filepath.Join(expandSlice(parts[0]), parts[1]+"-"+parts[2]+".scope")
}

// expandSlice: the slice a-b.slice lives in a.slice (systemd.slice(5)).
func expandSlice(slice string) string {
	name := strings.TrimSuffix(slice, ".slice")
	if name == "-" || name == "" {
		return "/"
	}
	path, prefix := "/", ""
	for _, part := range strings.Split(name, "-") {
		path = filepath.Join(path, prefix+part+".slice")
		prefix += part + "-"
	}
	return path
}

// Processes are the processes in the cgroup and below it, in any hierarchy.
func (h Hierarchies) Processes(path string) ([]int, error) {
	var found []int
	for _, hierarchy := range h {
		pids, err := Group{Dir: filepath.Join(hierarchy, path)}.Processes()
		if err != nil {
			return nil, err
		}
		found = append(found, pids...)
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// ErrBusy: processes in the cgroup did not go when they were killed. They are
// in an uninterruptible sleep; the cgroup can be removed when they wake.
var ErrBusy = fmt.Errorf("processes remain in the cgroup after SIGKILL: %w", errdefs.ErrUnavailable)

// Remove kills what runs in the cgroup, waits until it has gone, for no longer
// than the limit, and removes the cgroup from every hierarchy. One that is not
// there is no error.
func (h Hierarchies) Remove(path string, limit time.Duration) error {
	// Cleaned as a rooted path: it never leads out of a hierarchy.
	path = filepath.Clean("/" + path)
	if path == "/" {
		return fmt.Errorf("remove cgroup %q: that is the root", path)
	}
	if h.gone(path) { // as a rule: its supervisor has removed it
		return nil
	}
	if err := h.kill(path, limit); err != nil {
		return err
	}
	if strings.HasSuffix(path, ".scope") && Unified() {
		h.awaitSystemd(path)
	}
	var errs []error
	for _, hierarchy := range h {
		if err := cgroups.RemovePath(filepath.Join(hierarchy, path)); err != nil {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// awaitSystemd lets systemd see that a scope is empty: then it removes the
// cgroup, and its unit. If the cgroup is gone when it comes to look, it takes
// the scope for running, forever.
func (h Hierarchies) awaitSystemd(path string) {
	const timeout = 3 * time.Second // it may be reloading
	for deadline := time.Now().Add(timeout); h.Exists(path) && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
}

// errForeign: the kernel lists processes that this pid namespace does not see as
// 0 (pid_namespaces(7)). To signal 0 would be to signal ourselves (kill(2)), and
// they are another node's.
var errForeign = errors.New("it has processes of another pid namespace: not touched")

func (h Hierarchies) kill(path string, limit time.Duration) error {
	deadline := time.Now().Add(limit)
	pids, err := h.Processes(path)
	if err != nil || len(pids) == 0 {
		return err
	}
	if pids[0] < 1 {
		return fmt.Errorf("cgroup %s: %w", path, errForeign)
	}
	for _, hierarchy := range h {
		if err := (Group{Dir: filepath.Join(hierarchy, path), V2: Unified()}).Kill(time.Until(deadline)); err != nil {
			return err
		}
	}
	return nil
}

// gone reports whether no hierarchy has the cgroup, as far as can be seen.
func (h Hierarchies) gone(path string) bool {
	for _, hierarchy := range h {
		if _, err := os.Lstat(filepath.Join(hierarchy, path)); !errors.Is(err, fs.ErrNotExist) {
			return false
		}
	}
	return true
}

// Exists reports whether any hierarchy has the cgroup.
func (h Hierarchies) Exists(path string) bool {
	for _, hierarchy := range h {
		if _, err := os.Stat(filepath.Join(hierarchy, path)); err == nil {
			return true
		}
	}
	return false
}

// Find lists the cgroups, of any hierarchy, whose name starts with the prefix, as
// paths below the hierarchy. It looks below the parents only, for "/" among its
// children, and never into a cgroup of a minicri: what a node that runs in a
// container has made there is that node's.
func (h Hierarchies) Find(prefix string, parents []string) ([]string, error) {
	if prefix == "" {
		return nil, errors.New("search the cgroups: without a prefix every cgroup would be found")
	}
	found := make(map[string]bool)
	for _, hierarchy := range h {
		for _, parent := range parents {
			top := filepath.Join(hierarchy, parent)
			err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
				if err != nil {
					return ignoreGone(err)
				}
				ours := strings.HasPrefix(entry.Name(), prefix)
				switch {
				case !entry.IsDir() || path == top:
					return nil
				case ours:
					found[strings.TrimPrefix(path, hierarchy)] = true
				}
				if ours || parent == "/" || strings.HasPrefix(entry.Name(), "minicri-") {
					return fs.SkipDir
				}
				return nil
			})
			if err != nil {
				return nil, fmt.Errorf("search the cgroups: %w", err)
			}
		}
	}
	paths := make([]string, 0, len(found))
	for path := range found {
		paths = append(paths, path)
	}
	return paths, nil
}
