package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/node"
)

// CgroupDriver is that of all nodes: cgroupfs, or what the environment says. systemd needs
// a machine that it runs, and no process namespace between: it takes the ids of processes
// as it sees them.
func CgroupDriver() string {
	if driver := os.Getenv("MINICRI_CGROUP_DRIVER"); driver != "" {
		return driver
	}
	return "cgroupfs"
}

// cgroupParent is the node's, in the form of the driver: systemd nests slices
// by their names, so the name may have no dash.
func cgroupParent(unique string) string {
	if CgroupDriver() == "systemd" {
		return "/" + unique + ".slice"
	}
	return "/" + cgroupPrefix + unique
}

// makeSlice has systemd make a slice, as a kubelet does for a pod. It is below
// the one that its name names, up to the last dash.
func (n *Node) makeSlice(path string) {
	n.t.Helper()
	n.must("making a slice", systemctl("start", filepath.Base(path)))
}

// slicePath is where systemd has a child of the node's slice.
func (n *Node) slicePath(name string) string {
	child := strings.TrimSuffix(filepath.Base(n.CgroupParent), ".slice") + "-" + strings.ReplaceAll(name, "-", "_") + ".slice"
	return filepath.Join(n.CgroupParent, child)
}

// checkUnits finds units of pods that ended and that systemd still has, such
// as failed ones.
func (n *Node) checkUnits() error {
	if CgroupDriver() != "systemd" {
		return nil
	}
	identity, err := node.Read(n.Root)
	if err != nil {
		return err
	}
	units := strings.Replace(identity.Mark(), "minicri-", "minicri-*", 1) + "*"
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

// removeSlice ends what is in the node's slice and below it, by force.
func (n *Node) removeSlice() error {
	return systemctl("stop", filepath.Base(n.CgroupParent))
}

func systemctl(arguments ...string) error {
	if output, err := exec.Command("systemctl", arguments...).CombinedOutput(); err != nil {
		return errors.New(strings.TrimSpace(fmt.Sprintf("systemctl %s: %v: %s", strings.Join(arguments, " "), err, output)))
	}
	return nil
}
