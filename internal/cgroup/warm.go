package cgroup

import (
	"context"
	"os"
	"strconv"
	"time"

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

const (
	// warmPause is shorter than the lock stays warm: that is a grace period at least.
	warmPause = 4 * time.Millisecond
	// mostWarm is enough for a program to start and to make a cgroup.
	mostWarm = 200 * time.Millisecond
)

// KeepLockWarm is WarmLock for a program that moves a process at a time which is not
// known, until the context ends, or the program has had enough time for it.
func KeepLockWarm(ctx context.Context) {
	if Unified() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, mostWarm)
	defer cancel()
	for ctx.Err() == nil {
		WarmLock()
		select {
		case <-ctx.Done():
		case <-time.After(warmPause):
		}
	}
}
