package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// Reboot does to the node what a reboot of the machine does: PowerOff, and the
// state directory is empty.
func (n *Node) Reboot() {
	n.t.Helper()
	n.PowerOff()
	n.must("emptying the state directory", errors.Join(os.RemoveAll(n.State), os.Mkdir(n.State, 0o755)))
}

// PowerOff ends what a reboot ends, whatever the state directory is on: the daemon
// and every process of its pods and plugins, mounts, namespaces and with them their
// links, and the packet filter's rules.
func (n *Node) PowerOff() {
	n.t.Helper()
	if n.Running() {
		n.Kill()
	}
	Eventually(n.t, "all processes of node "+n.Network+" have ended", settleTime, func() bool {
		left := n.processes()
		for _, pid := range left {
			_ = unix.Kill(pid, unix.SIGKILL) // it may be gone by now
		}
		return len(left) == 0
	})
	n.must("unmounting", n.unmountAll())
	n.must("flushing the packet filter", n.inNetns(flushRules))
	n.must("emptying the directory of namespaces", errors.Join(os.RemoveAll(n.Netns), os.Mkdir(n.Netns, 0o755)))
}

func flushRules() error {
	for _, order := range []string{"-F", "-X"} {
		if text, err := exec.Command("iptables", "-t", "nat", order).CombinedOutput(); err != nil {
			return fmt.Errorf("iptables: %w: %s", err, text)
		}
	}
	return nil
}

// processes are those in the node's cgroups, and those that were started with a
// path of its volatile directory.
func (n *Node) processes() (pids []int) {
	found := make(map[int]bool)
	for _, hierarchy := range n.hierarchies() {
		dirs, err := cgroupTree(filepath.Join(hierarchy, n.CgroupParent))
		n.must("looking for processes", err)
		for _, dir := range dirs {
			list, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // it may be gone by now
			for _, field := range strings.Fields(string(list)) {
				pid, _ := strconv.Atoi(field)
				found[pid] = true
			}
		}
	}
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if strings.Contains(string(line), n.State+"/") {
			found[pid] = true
		}
	}
	// What these have started: a starter that its supervisor has stopped, to kill it, ends
	// with nobody.
	for more := true; more; {
		more = false
		for _, path := range lines {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			if stat, err := process.ReadStat(pid); err == nil && !found[pid] && stat.Parent != os.Getpid() && found[stat.Parent] {
				found[pid], more = true, true
			}
		}
	}
	for pid := range found {
		// Processes of other process namespaces are listed as 0.
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); pid > 1 && pid != os.Getpid() && err == nil && !strings.Contains(string(stat), ") Z ") {
			pids = append(pids, pid)
		}
	}
	return pids
}
