package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/supervisor/cgroup"
	"github.com/minicri/minicri/supervisor/starter"
)

// update sets resources, those that are named, and oom_score_adj unless it is nil, of
// all processes: all or with an error none.
func update(r starter.Request, c container) error {
	wanted := new(specs.LinuxResources)
	if err := decode(r.Resources, wanted); err != nil {
		return err
	}
	paths := cgroup.Paths(r.Cgroups)
	undo := func() error { return nil }
	if r.OOMScoreAdj != nil {
		var err error
		if undo, err = setOOMScoreAdj(paths, *r.OOMScoreAdj); err != nil {
			return err
		}
	}
	before := readLimits(paths, wanted.Unified)
	err := tryLimits(paths, alone(wanted))
	if err == nil {
		err = c.setResources(wanted, r.OOMScoreAdj)
	}
	if err != nil {
		return errors.Join(err, before.restore(), undo())
	}
	return nil
}

func (c *libContainer) setResources(wanted *specs.LinuxResources, oomScoreAdj *int) error {
	lib, err := libcontainer.Load(c.Root, c.ID)
	if err != nil {
		return fmt.Errorf("load container %s: %w", c.ID, err)
	}
	config := lib.Config()
	group, resources := *config.Cgroups, *config.Cgroups.Resources
	apply(&resources, wanted)
	// Version 2 takes a limit below what is in use, and kills for it.
	resources.SkipDevices, resources.MemoryCheckBeforeUpdate = true, true
	group.Resources, config.Cgroups = &resources, &group
	if oomScoreAdj != nil {
		config.OomScoreAdj = oomScoreAdj // of later execs
	}
	err = lib.Set(config)
	resources.SkipDevices = false // libcontainer keeps config, and refuses to start execs with it
	return err
}

// apply overwrites r with what wanted names.
func apply(r *cgroups.Resources, wanted *specs.LinuxResources) {
	if cpu := wanted.CPU; cpu != nil {
		setField(&r.CpuShares, cpu.Shares)
		setField(&r.CpuQuota, cpu.Quota)
		setField(&r.CpuPeriod, cpu.Period)
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
		setField(&r.Memory, memory.Limit)
		setField(&r.MemoryReservation, memory.Reservation)
		setField(&r.MemorySwap, memory.Swap)
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

func setField[T any](field, wanted *T) {
	if wanted != nil {
		*field = *wanted
	}
}

func decode(encoded json.RawMessage, into any) error {
	if err := json.Unmarshal(encoded, into); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	return nil
}

func writeJSON(path string, value any) error {
	encoded, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return os.WriteFile(path, encoded, 0o600)
}
