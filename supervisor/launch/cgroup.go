package launch

import (
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/opencontainers/cgroups"
	_ "github.com/opencontainers/cgroups/devices" // without it no rules of devices can be set
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/cgroups/manager"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/cgroup"
)

// enterCgroups brings what goes on with the list into cgroups, by controller. The whole
// kernel has a lock for processes that are moved (cgroup_procs_write_start of
// kernel/cgroup/cgroup.c), for which others wait some milliseconds; on version 1 a
// single thread that moves itself needs none of it, on version 2 a process that is born
// in its cgroup does not.
func (a *attempt) enterCgroups(cgroups map[string]string) error {
	for _, controller := range slices.Sorted(maps.Keys(cgroups)) {
		if controller != "" {
			a.write("enter the cgroup "+cgroups[controller], cgroups[controller]+"/tasks", "0")
		}
	}
	unified, ok := cgroups[""]
	if !ok {
		return nil
	}
	dir, err := a.give(os.OpenFile(unified, unix.O_PATH|unix.O_DIRECTORY, 0))
	if err != nil {
		return err
	}
	// struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size,
	// tls, set_tid, set_tid_size, cgroup.
	args := a.numbers(unix.CLONE_INTO_CGROUP, 0, 0, 0, uint64(unix.SIGCHLD), 0, 0, 0, 0, 0, dir)
	// An outer container's filter may not know clone3(2): it then moves itself.
	const move = 3
	what := "enter the cgroup " + unified
	a.put(what, mayFail|afterSuccess|forks|move<<skipShift, unix.SYS_CLONE3, []uint64{args, 11 * 8})
	a.put(what, keep, unix.SYS_OPENAT, []uint64{dir, a.text("cgroup.procs"), unix.O_WRONLY | unix.O_CLOEXEC})
	a.use(what, unix.SYS_WRITE, a.text("0"), 1)
	a.use(what, unix.SYS_CLOSE)
	return nil
}

// resetAffinity: it is then what the cpuset of the cgroup allows, whatever that of the
// supervisor is.
func (a *attempt) resetAffinity() {
	const mostCPUs = 8192 // CONFIG_NR_CPUS
	all := slices.Repeat([]byte{0xff}, mostCPUs/8)
	a.try("reset the CPU affinity", unix.SYS_SCHED_SETAFFINITY, 0, uint64(len(all)), a.bytes(all))
}

// pauseCgroups are the cgroups of a pause, which are not made by that.
func pauseCgroups(p Pause) (cgroups.Manager, *cgroups.Resources, error) {
	c := cgroup.ConfigOf(p.Spec.Linux.CgroupsPath, p.SystemdCgroup)
	if c == nil {
		return nil, nil, fmt.Errorf("the cgroup %q is none of its own", p.Spec.Linux.CgroupsPath)
	}
	r := c.Resources
	r.Devices = pauseDevices()
	if asked := p.Spec.Linux.Resources; asked != nil {
		if asked.CPU != nil && asked.CPU.Shares != nil {
			r.CpuShares = *asked.CPU.Shares
			r.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(r.CpuShares)
		}
		if asked.Memory != nil && asked.Memory.Limit != nil {
			r.Memory = *asked.Memory.Limit
		}
		if asked.Pids != nil {
			r.PidsLimit = asked.Pids.Limit
		}
	}
	m, err := manager.New(c)
	return m, r, err
}

// pauseDevices are what libcontainer allows each container: to make any node, and to use
// null, zero, full, random, urandom, tty, ptmx, terminals and tun.
func pauseDevices() (rules []*devices.Rule) {
	allow := func(kind devices.Type, major, minor int64, what devices.Permissions) {
		rules = append(rules, &devices.Rule{Type: kind, Major: major, Minor: minor, Permissions: what, Allow: true})
	}
	allow(devices.CharDevice, devices.Wildcard, devices.Wildcard, "m")
	allow(devices.BlockDevice, devices.Wildcard, devices.Wildcard, "m")
	for _, number := range [][2]int64{{1, 3}, {1, 8}, {1, 7}, {5, 0}, {1, 5}, {1, 9}, {136, devices.Wildcard}, {5, 2}, {10, 200}} {
		allow(devices.CharDevice, number[0], number[1], "rwm")
	}
	return rules
}

// setCgroups makes the cgroups and moves a process there; -1 for none.
func setCgroups(m cgroups.Manager, r *cgroups.Resources, pid int) error {
	if err := m.Apply(pid); err != nil {
		return fmt.Errorf("make the cgroups: %w", err)
	}
	if err := m.Set(r); err != nil {
		return fmt.Errorf("set the cgroups: %w", err)
	}
	return nil
}
