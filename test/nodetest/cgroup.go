package nodetest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/test/harness"
)

// makeCgroups makes the node's parent in every hierarchy, as a kubelet does for its pods.
func (n *Node) makeCgroups() {
	if harness.CgroupDriver() == "systemd" {
		n.makeSlice(n.CgroupParent)
		return
	}
	for _, hierarchy := range n.hierarchies() {
		dir := filepath.Join(hierarchy, n.CgroupParent)
		n.must("making a cgroup", errors.Join(os.Mkdir(dir, 0o755), fillCpuset(dir)))
	}
}

// MakeCgroup makes a cgroup below the node's parent in every hierarchy, as a kubelet does for one pod, and
// returns its path. It is removed before the node is checked, when it has to be empty.
func (n *Node) MakeCgroup(name string) string {
	path := filepath.Join(n.CgroupParent, name)
	if harness.CgroupDriver() == "systemd" {
		path = n.slicePath(name)
		n.makeSlice(path)
	} else {
		for _, hierarchy := range n.hierarchies() {
			dir := filepath.Join(hierarchy, path)
			n.must("making a cgroup", errors.Join(os.Mkdir(dir, 0o755), fillCpuset(dir)))
		}
	}
	n.podCgroups = append(n.podCgroups, path)
	return path
}

// removePodCgroups does not force anything: what is left below them is a leak.
func (n *Node) removePodCgroups() error {
	var errs error
	for _, path := range n.podCgroups {
		if harness.CgroupDriver() == "systemd" {
			errs = errors.Join(errs, n.stopEmptySlice(path))
			continue
		}
		for _, hierarchy := range n.hierarchies() {
			errs = errors.Join(errs, harness.IgnoreMissing(os.Remove(filepath.Join(hierarchy, path))))
		}
	}
	return errs
}

func (n *Node) hierarchies() []string {
	mountpoints, err := hierarchies()
	n.must("finding the cgroups", err)
	return mountpoints
}

// fillCpuset gives a cgroup v1 cpuset what its parent has: a new one has no CPUs and lets no process in. With
// cgroup v2 an empty one inherits.
func fillCpuset(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "cgroup.clone_children")); err != nil {
		return harness.IgnoreMissing(err)
	}
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err != nil {
			return harness.IgnoreMissing(err) // a v1 hierarchy of another controller has none
		}
		if err := os.WriteFile(filepath.Join(dir, name), value, 0); err != nil {
			return err
		}
	}
	return nil
}

// removeCgroups takes the parent away with all that is in it, by force. It kills in every hierarchy first: a
// process may be in the one and not in the other.
func (n *Node) removeCgroups() error {
	if harness.CgroupDriver() == "systemd" {
		return systemctl("stop", filepath.Base(n.CgroupParent))
	}
	var errs error
	for _, hierarchy := range n.hierarchies() {
		errs = errors.Join(errs, killAll(filepath.Join(hierarchy, n.CgroupParent)))
	}
	for _, hierarchy := range n.hierarchies() {
		errs = errors.Join(errs, removeCgroup(filepath.Join(hierarchy, n.CgroupParent)))
	}
	return errs
}

// cgroupTree returns a cgroup and all below it, the deepest first.
func cgroupTree(root string) ([]string, error) {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}
		return harness.IgnoreMissing(err)
	})
	slices.Reverse(dirs)
	return dirs, err
}

// processesIn are those of a cgroup and of all below it.
func processesIn(root string) (pids []int, err error) {
	dirs, err := cgroupTree(root)
	for _, dir := range dirs {
		list, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // it may be gone by now
		for field := range strings.FieldsSeq(string(list)) {
			// Processes of other process namespaces are listed as 0.
			if pid, err := strconv.Atoi(field); err == nil && pid > 1 {
				pids = append(pids, pid)
			}
		}
	}
	return pids, err
}

func killAll(root string) error {
	pids, err := processesIn(root)
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGKILL) // it may be gone by now
	}
	return err
}

// emptyTime is what the kernel may take until processes that were killed have left their cgroup.
const emptyTime = 5 * time.Minute

// removeCgroup waits for the processes that were killed: the kernel refuses to remove a cgroup with one.
func removeCgroup(root string) error {
	for deadline := time.Now().Add(emptyTime); ; time.Sleep(10 * time.Millisecond) {
		dirs, err := cgroupTree(root)
		for _, dir := range dirs {
			err = harness.IgnoreMissing(os.Remove(dir))
		}
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("a cgroup stays: %w", err)
		}
	}
}

// cgroupPrefix is what the parent cgroups of nodes begin with; the name of the node's directory follows.
const cgroupPrefix = "minicri-tests-"

func hierarchies() (mountpoints []string, err error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	for _, m := range mounts {
		mountpoints = append(mountpoints, m.Mountpoint)
	}
	return mountpoints, err
}

// cgroupParent is the node's, in the form of the driver: systemd nests slices by their names, so the name may
// have no dash.
func cgroupParent(unique string) string {
	if harness.CgroupDriver() == "systemd" {
		return "/" + unique + ".slice"
	}
	return "/" + cgroupPrefix + unique
}

// makeSlice has systemd make a slice, as a kubelet does for a pod. It is below the one that its name names,
// up to the last dash.
func (n *Node) makeSlice(path string) {
	n.must("making a slice", systemctl("start", filepath.Base(path)))
}

// slicePath is where systemd has a child of the node's slice.
func (n *Node) slicePath(name string) string {
	child := strings.TrimSuffix(filepath.Base(n.CgroupParent), ".slice") + "-" + strings.ReplaceAll(name, "-", "_") + ".slice"
	return filepath.Join(n.CgroupParent, child)
}

// checkUnits finds units of pods that ended and that systemd still has, such as failed ones.
func (n *Node) checkUnits() error {
	if harness.CgroupDriver() != "systemd" {
		return nil
	}
	identity, err := node.Read(n.Root)
	if err != nil {
		return err
	}
	units := node.ScopePrefix + "-*" + identity.IDTail() + ".scope"
	for deadline := time.Now().Add(settleTime); ; time.Sleep(50 * time.Millisecond) {
		output, err := exec.Command("systemctl", "list-units", "--all", "--plain", "--no-legend", units).Output()
		if err != nil || len(output) == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("left behind: %s", output)
		}
	}
}

// stopEmptySlice: what still runs in a pod's slice is a leak, and stays.
func (n *Node) stopEmptySlice(path string) error {
	for _, hierarchy := range n.hierarchies() {
		if below, err := filepath.Glob(filepath.Join(hierarchy, path, "*", "cgroup.procs")); err != nil || len(below) > 0 {
			return errors.Join(err, fmt.Errorf("left behind: %v", below))
		}
	}
	return systemctl("stop", filepath.Base(path))
}

func systemctl(arguments ...string) error {
	if output, err := exec.Command("systemctl", arguments...).CombinedOutput(); err != nil {
		return errors.New(strings.TrimSpace(fmt.Sprintf("systemctl %s: %v: %s", strings.Join(arguments, " "), err, output)))
	}
	return nil
}
