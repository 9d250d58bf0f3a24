package contender

import (
	"os"
	"strings"
)

// Owner is what processes of one kind hold.
type Owner struct {
	Processes, Threads int
	KiB                int // Memory
}

// Owners are the daemon, its shims and the pause processes of the node's pods.
type Owners struct{ Daemon, Shims, Pauses Owner }

// KiB is the memory of all: what the node's pods cost beside their own processes.
func (o Owners) KiB() int { return o.Daemon.KiB + o.Shims.KiB + o.Pauses.KiB }

// Owners weighs what runs for the node's pods.
func (n *Node) Owners() (o Owners, err error) {
	o.Daemon = Must(ownerOf([]int{n.PID}))
	shims := Must(named(n.shim))
	o.Shims = Must(ownerOf(shims))
	all := Must(named("pause"))
	var pauses []int
	for _, pid := range all {
		cgroups, err := os.ReadFile(procFile(pid, "cgroup"))
		if err == nil && strings.Contains(string(cgroups), n.cgroupParent()+"/") {
			pauses = append(pauses, pid)
		}
	}
	o.Pauses, err = ownerOf(pauses)
	return o, err
}

func ownerOf(pids []int) (o Owner, err error) {
	for _, pid := range pids {
		kib, err := Memory(pid)
		if ended(err) {
			continue
		}
		if err != nil {
			return o, err
		}
		threads := Must(os.ReadDir(procFile(pid, "task")))
		o.Processes, o.Threads, o.KiB = o.Processes+1, o.Threads+len(threads), o.KiB+kib
	}
	return o, nil
}
