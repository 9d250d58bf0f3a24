package cgroup

import (
	"os"
	"strconv"

	"github.com/opencontainers/cgroups"
)

// WarmLock makes the moves of processes into cgroups cheap that follow within
// some milliseconds. Every such move takes a kernel-wide lock
// (cgroup_threadgroup_rwsem), whose first taker after a quiet moment waits for
// an RCU grace period: 5 to 15 ms. Moving ourselves to where we are already
// waits for it too, at the same time as the work that comes before the real move.
// Failure costs nothing but the time. On version 2 processes are born in their cgroup
// and there is nothing to do.
func WarmLock() {
	if Unified() {
		return
	}
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		return
	}
	procs := "/sys/fs/cgroup/devices" + own["devices"] + "/cgroup.procs"
	_ = os.WriteFile(procs, []byte(strconv.Itoa(os.Getpid())), 0)
}
