package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
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
	Eventually(n.t, "all processes of node "+n.Network+" have ended", func() bool {
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
	all := Processes()
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

// Process is one of /proc.
type Process struct {
	process.Stat
	PID  int
	Args []string
}

// Processes are those in sight.
func Processes() (all []Process) {
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		line, _ := os.ReadFile(path) // it may have ended
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if stat, err := process.ReadStat(pid); err == nil {
			all = append(all, Process{stat, pid, strings.Split(string(line), "\x00")})
		}
	}
	return all
}

// Supervisors are the processes that supervise the node's pods, in order.
func (n *Node) Supervisors() (pids []int) {
	parents := make(map[int]int)
	for _, p := range Processes() {
		if len(p.Args) > 3 && p.Args[1] == "serve" && strings.HasPrefix(p.Args[3], n.State+"/") {
			pids, parents[p.PID] = append(pids, p.PID), p.Parent
		}
	}
	// What one has forked, and has not executed its program yet, looks like it.
	slices.Sort(pids)
	return slices.DeleteFunc(pids, func(pid int) bool { _, forked := parents[parents[pid]]; return forked })
}

// KernelTellsExits reports whether Linux tells by a pidfd how a process ended, as from 6.15 on.
func KernelTellsExits() bool {
	var name unix.Utsname
	_ = unix.Uname(&name)
	var major, minor int
	_, _ = fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	return major > 6 || major == 6 && minor >= 15
}

// Freeze stops a process until the test's end, and waits until no thread of it runs: one of them has to see the signal
// before the others stop.
func Freeze(t testing.TB, pid int) {
	t.Helper()
	Check(t, unix.Kill(pid, unix.SIGSTOP))
	t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) }) // it may have been killed
	Eventually(t, "it has stopped", func() bool { return process.HasStopped(pid) })
}
