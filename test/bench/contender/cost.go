package contender

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// CPU is what the daemon and all its shims have used: not what their
// containers have.
func (n *Node) CPU() (time.Duration, error) { return n.cpu(CPU) }

// CPUWithChildren is CPU with that of processes which have ended: helpers that
// set containers up, and the containers.
func (n *Node) CPUWithChildren() (time.Duration, error) { return n.cpu(CPUWithChildren) }

func (n *Node) cpu(of func(pid int) (time.Duration, error)) (sum time.Duration, err error) {
	shims, err := named(n.shim)
	if err != nil {
		return 0, err
	}
	for _, pid := range append(shims, n.PID) {
		cpu, err := of(pid)
		if err != nil {
			return 0, err
		}
		sum += cpu
	}
	return sum, nil
}

// Weight is the PSS of all shims and pause processes of the node, in KiB, and
// their counts.
func (n *Node) Weight() (shims, pauses int, kib int, err error) {
	all, err := named(n.shim)
	if err != nil {
		return 0, 0, 0, err
	}
	shims = len(all)
	sandboxes, err := named("pause")
	if err != nil {
		return 0, 0, 0, err
	}
	for _, pid := range sandboxes {
		cgroups, err := os.ReadFile(procFile(pid, "cgroup"))
		if err != nil {
			return 0, 0, 0, err
		}
		if strings.Contains(string(cgroups), n.cgroupParent()+"/") {
			all = append(all, pid)
		}
	}
	for _, pid := range all {
		one, err := PSS(pid)
		if err != nil {
			return 0, 0, 0, fmt.Errorf("%s: %w", n.Name, err)
		}
		kib += one
	}
	return shims, len(all) - shims, kib, nil
}
