package runtime

import (
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Update is of Container. libcontainer puts the old resources back when one of
// the new is refused.
func (c *builtinContainer) Update(wanted *specs.LinuxResources) error {
	config := c.lib.Config()
	group := *config.Cgroups
	resources := *group.Resources
	group.Resources, config.Cgroups = &resources, &group
	apply(&resources, wanted)
	resources.SkipDevices = true
	err := c.lib.Set(config)
	resources.SkipDevices = false // libcontainer keeps config, and refuses to start execs with it
	return err
}

// apply overwrites r with what wanted names.
func apply(r *cgroups.Resources, wanted *specs.LinuxResources) {
	if cpu := wanted.CPU; cpu != nil {
		set(&r.CpuShares, cpu.Shares)
		set(&r.CpuQuota, cpu.Quota)
		set(&r.CpuPeriod, cpu.Period)
		if cpu.Shares != nil {
			r.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(*cpu.Shares)
		}
		if cpu.Cpus != "" {
			r.CpusetCpus = cpu.Cpus
		}
		if cpu.Mems != "" {
			r.CpusetMems = cpu.Mems
		}
	}
	if memory := wanted.Memory; memory != nil {
		set(&r.Memory, memory.Limit)
		set(&r.MemoryReservation, memory.Reservation)
		set(&r.MemorySwap, memory.Swap)
	}
	if pids := wanted.Pids; pids != nil {
		r.PidsLimit = pids.Limit
	}
	for _, limit := range wanted.HugepageLimits {
		r.HugetlbLimit = append(r.HugetlbLimit, &cgroups.HugepageLimit{Pagesize: limit.Pagesize, Limit: limit.Limit})
	}
	if len(wanted.Unified) > 0 {
		r.Unified = wanted.Unified
	}
}

func set[T any](field, wanted *T) {
	if wanted != nil {
		*field = *wanted
	}
}
