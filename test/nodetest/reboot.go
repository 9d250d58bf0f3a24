package nodetest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// Reboot does to the node what a reboot of the machine does: PowerOff, and the state directory is empty.
func (n *Node) Reboot() {
	n.PowerOff()
	n.must("emptying the state directory", errors.Join(os.RemoveAll(n.State), os.Mkdir(n.State, 0o755)))
}

// PowerOff ends what a reboot ends, whatever the state directory is on: the daemon and every process of its
// pods and plugins, mounts, namespaces and with them their links, and the packet filter's rules.
func (n *Node) PowerOff() {
	if n.Running() {
		n.Kill()
	}
	harness.Eventually(n.t, "all processes of node "+n.Network+" have ended", func() bool {
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

// processes are those in the node's cgroups, those that were started with a path of its volatile directory,
// and what these have started.
func (n *Node) processes() (pids []int) {
	found := make(map[int]bool)
	for _, hierarchy := range n.hierarchies() {
		inside, err := processesIn(filepath.Join(hierarchy, n.CgroupParent))
		n.must("looking for processes", err)
		for _, pid := range inside {
			found[pid] = true
		}
	}
	all := harness.Processes()
	for _, p := range all {
		found[p.PID] = found[p.PID] || strings.Contains(strings.Join(p.Args, " "), n.State+"/")
	}
	// A starter that its supervisor has stopped, to kill it, ends with nobody.
	for more := true; more; {
		more = false
		for _, p := range all {
			if !found[p.PID] && p.Parent != os.Getpid() && found[p.Parent] {
				found[p.PID], more = true, true
			}
		}
	}
	for pid, is := range found {
		if stat, err := process.ReadStat(pid); is && pid != os.Getpid() && err == nil && stat.State != 'Z' {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Supervisors are the processes that supervise the node's pods, in order.
func (n *Node) Supervisors() (pids []int) {
	parents := make(map[int]int)
	for _, p := range harness.Processes() {
		if len(p.Args) > 3 && p.Args[1] == "serve" && strings.HasPrefix(p.Args[3], n.State+"/") {
			pids, parents[p.PID] = append(pids, p.PID), p.Parent
		}
	}
	// What one has forked, and has not executed its program yet, looks like it.
	slices.Sort(pids)
	return slices.DeleteFunc(pids, func(pid int) bool { _, forked := parents[parents[pid]]; return forked })
}
