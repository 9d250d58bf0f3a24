package harness

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// makeCgroups makes the node's parent in every hierarchy, as a kubelet does for
// its pods.
func (n *Node) makeCgroups() {
	n.t.Helper()
	if CgroupDriver() == "systemd" {
		n.makeSlice(n.CgroupParent)
		return
	}
	for _, hierarchy := range n.hierarchies() {
		dir := filepath.Join(hierarchy, n.CgroupParent)
		owned, err := makeOwned(dir)
		n.must("making a cgroup", err)
		n.cgroups = append(n.cgroups, owned)
		n.must("filling a cpuset", fillCpuset(dir))
	}
}

func (n *Node) makeCgroup(path string) {
	n.t.Helper()
	for _, hierarchy := range n.hierarchies() {
		dir := filepath.Join(hierarchy, path)
		n.must("making a cgroup", os.Mkdir(dir, 0o755))
		n.must("filling a cpuset", fillCpuset(dir))
	}
}

// MakeCgroup makes a cgroup below the node's parent in every hierarchy, as a
// kubelet does for one pod, and returns its path. It is removed before the
// node is checked, when it has to be empty.
func (n *Node) MakeCgroup(name string) string {
	n.t.Helper()
	path := filepath.Join(n.CgroupParent, name)
	if CgroupDriver() == "systemd" {
		path = n.slicePath(name)
		n.makeSlice(path)
	} else {
		n.makeCgroup(path)
	}
	n.podCgroups = append(n.podCgroups, path)
	return path
}

// removePodCgroups does not force anything: what is left below them is a leak.
func (n *Node) removePodCgroups() error {
	var errs []error
	for _, path := range n.podCgroups {
		if CgroupDriver() == "systemd" {
			errs = append(errs, n.stopEmptySlice(path))
			continue
		}
		for _, hierarchy := range n.hierarchies() {
			errs = append(errs, ignoreMissing(os.Remove(filepath.Join(hierarchy, path))))
		}
	}
	return errors.Join(errs...)
}

func (n *Node) hierarchies() []string {
	n.t.Helper()
	mountpoints, err := hierarchies()
	n.must("finding the cgroups", err)
	return mountpoints
}

// fillCpuset gives a cgroup v1 cpuset what its parent has: a new one has no
// CPUs and lets no process in. With cgroup v2 an empty one inherits.
func fillCpuset(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "cgroup.clone_children")); err != nil {
		return ignoreMissing(err)
	}
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a v1 hierarchy of another controller
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), value, 0); err != nil {
			return err
		}
	}
	return nil
}

// removeCgroups takes the parent away with all that is in it, by force. It kills
// in every hierarchy first: a process may be in the one and not in the other.
func (n *Node) removeCgroups() error {
	if CgroupDriver() == "systemd" {
		return n.removeSlice()
	}
	var errs []error
	for _, hierarchy := range n.hierarchies() {
		errs = append(errs, killAll(filepath.Join(hierarchy, n.CgroupParent)))
	}
	for _, hierarchy := range n.hierarchies() {
		errs = append(errs, removeCgroup(filepath.Join(hierarchy, n.CgroupParent)))
	}
	for _, owned := range n.cgroups {
		errs = append(errs, owned.Close())
	}
	n.cgroups = nil
	return errors.Join(errs...)
}

// cgroupTree returns a cgroup and all below it, the deepest first.
func cgroupTree(root string) ([]string, error) {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}
		return ignoreMissing(err)
	})
	slices.Reverse(dirs)
	return dirs, err
}

func killAll(root string) error {
	dirs, err := cgroupTree(root)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		list, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			return ignoreMissing(err)
		}
		for _, field := range strings.Fields(string(list)) {
			// Processes of other process namespaces are listed as 0.
			if pid, err := strconv.Atoi(field); err == nil && pid > 1 {
				unix.Kill(pid, unix.SIGKILL) // it may be gone by now
			}
		}
	}
	return nil
}

// emptyTime is what the kernel may take until processes that were killed have left
// their cgroup.
const emptyTime = 20 * time.Second

// removeCgroup waits for the processes that were killed: the kernel refuses to
// remove a cgroup with one.
func removeCgroup(root string) error {
	var err error
	for deadline := time.Now().Add(emptyTime); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		var dirs []string
		if dirs, err = cgroupTree(root); err != nil {
			return err
		}
		for _, dir := range dirs {
			err = ignoreMissing(os.Remove(dir))
		}
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("a cgroup stays: %w", err)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
