package runtime

import (
	"errors"
	"maps"
	"slices"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Update is of Container.
func (c *builtinContainer) Update(wanted *specs.LinuxResources, oomScoreAdj *int) error {
	undo := func() error { return nil }
	if oomScoreAdj != nil {
		var err error
		if undo, err = setOOMScoreAdj(c.cgroups, *oomScoreAdj); err != nil {
			return err
		}
	}
	if err := c.setResources(wanted, oomScoreAdj); err != nil {
		return errors.Join(err, undo())
	}
	return nil
}

// setResources sets all that is named, or with an error nothing. libcontainer
// puts the old resources back, but not those that had no value.
func (c *builtinContainer) setResources(wanted *specs.LinuxResources, oomScoreAdj *int) error {
	before := readLimits(c.cgroups, wanted.Unified)
	config := c.lib.Config()
	old := config.Cgroups.Resources
	resources := *old
	apply(&resources, wanted)
	// Version 2 takes a limit below what is in use, and kills for it.
	resources.MemoryCheckBeforeUpdate = true
	if oomScoreAdj != nil {
		config.OomScoreAdj = oomScoreAdj // of later execs
	}
	if err := tryLimits(c.cgroups, resources); err != nil {
		return errors.Join(err, before.restore())
	}
	err := c.set(config, &resources)
	if err == nil {
		return nil
	}
	defaults := *old
	nameDefaults(&defaults, wanted)
	// systemd keeps the properties of a unit: they have to be set there, too. What fails
	// here shows in the files.
	_ = c.set(c.lib.Config(), &defaults)
	return errors.Join(err, before.restore())
}

// set gives libcontainer a configuration with other resources.
func (c *builtinContainer) set(config configs.Config, resources *cgroups.Resources) error {
	group := *config.Cgroups
	group.Resources, config.Cgroups = resources, &group
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
	r.HugetlbLimit = slices.Clone(r.HugetlbLimit)
	for _, limit := range wanted.HugepageLimits {
		r.HugetlbLimit = slices.DeleteFunc(r.HugetlbLimit, func(old *cgroups.HugepageLimit) bool { return old.Pagesize == limit.Pagesize })
		r.HugetlbLimit = append(r.HugetlbLimit, &cgroups.HugepageLimit{Pagesize: limit.Pagesize, Limit: limit.Limit})
	}
	if len(wanted.Unified) > 0 {
		unified := maps.Clone(r.Unified)
		if unified == nil {
			unified = make(map[string]string)
		}
		maps.Copy(unified, wanted.Unified)
		r.Unified = unified
	}
}

func set[T any](field, wanted *T) {
	if wanted != nil {
		*field = *wanted
	}
}

// The kernel's values of what has not been set.
const (
	unlimited     = -1
	defaultShares = 1024
	defaultWeight = 100
	defaultPeriod = 100_000
)

// nameDefaults gives what wanted names and r has no value for the kernel's.
func nameDefaults(r *cgroups.Resources, wanted *specs.LinuxResources) {
	if cpu := wanted.CPU; cpu != nil {
		if cpu.Shares != nil && r.CpuShares == 0 {
			r.CpuShares, r.CpuWeight = defaultShares, defaultWeight
		}
		if cpu.Quota != nil && r.CpuQuota == 0 {
			r.CpuQuota = unlimited
		}
		if cpu.Period != nil && r.CpuPeriod == 0 {
			r.CpuPeriod = defaultPeriod
		}
	}
	if memory := wanted.Memory; memory != nil {
		if memory.Limit != nil && r.Memory == 0 {
			r.Memory = unlimited
		}
		if memory.Swap != nil && r.MemorySwap == 0 {
			r.MemorySwap = unlimited
		}
	}
}
