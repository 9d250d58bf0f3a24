package supervisor

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// update sets resources. libcontainer puts the old ones back when one of the
// new is refused.
func (c *container) update(encoded []byte) error {
	wanted := new(specs.LinuxResources)
	if err := json.Unmarshal(encoded, wanted); err != nil {
		return fmt.Errorf("update container %s: %w: %w", c.record.ID, errdefs.ErrInvalidArgument, err)
	}
	c.op.Lock()
	defer c.op.Unlock()
	if c.state().Exit != nil {
		return fmt.Errorf("update container %s: it has ended: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	config := c.lib.Config()
	group := *config.Cgroups
	resources := *group.Resources
	group.Resources, config.Cgroups = &resources, &group
	apply(&resources, wanted)
	resources.SkipDevices = true
	err := c.lib.Set(config)
	resources.SkipDevices = false // libcontainer keeps config, and refuses to start execs with it
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.record.ID, err)
	}
	return nil
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

// freeze pauses or resumes a container's processes.
func (c *container) freeze(pause bool) error {
	c.op.Lock()
	defer c.op.Unlock()
	change := c.lib.Resume
	if pause {
		change = c.lib.Pause
	}
	if err := change(); err != nil {
		return fmt.Errorf("pause or resume container %s: %w", c.record.ID, err)
	}
	c.mu.Lock()
	c.paused = pause
	c.mu.Unlock()
	return nil
}
