package machine

import (
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
)

const unifiedRoot = "/sys/fs/cgroup"

// readControllers: on version 1 what is mounted counts, not what the kernel
// could mount; in a hybrid tree that is what containers use.
func readControllers() ([]string, error) {
	controllers, err := cgroups.GetAllSubsystems()
	if err != nil {
		return nil, err
	}
	slices.Sort(controllers)
	if cgroups.IsCgroup2UnifiedMode() {
		return slices.Compact(controllers), nil
	}
	mounts, err := cgroups.GetCgroupMounts(true)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(controllers, func(controller string) bool {
		return !slices.ContainsFunc(mounts, func(m cgroups.Mount) bool { return slices.Contains(m.Subsystems, controller) })
	}), nil
}

// accountsSwap: kernels can be built or booted without accounting of swap.
// The root of version 2 has no such file, whatever is below it has.
func accountsSwap() bool {
	if cgroups.IsCgroup2UnifiedMode() {
		found, err := filepath.Glob(unifiedRoot + "/*/memory.swap.max")
		return err == nil && len(found) > 0
	}
	memory, err := cgroups.FindCgroupMountpoint("", "memory")
	return err == nil && cgroups.PathExists(filepath.Join(memory, "memory.memsw.limit_in_bytes"))
}

// delegates reports whether version 2 is mounted with nsdelegate.
func delegates() bool {
	if !cgroups.IsCgroup2UnifiedMode() {
		return false
	}
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(unifiedRoot))
	return err == nil && len(mounts) == 1 && slices.Contains(strings.Split(mounts[0].VFSOptions, ","), "nsdelegate")
}
