package oci

import (
	"cmp"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// pauseCPUShares is the least weight there is: pause only sleeps.
const pauseCPUShares = 2

func sandboxResources(_ *Sandbox, spec *specs.Spec) error {
	shares := uint64(pauseCPUShares)
	spec.Linux.Resources = &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}}
	return nil
}

// containerResources: what the container asks for over what the base spec has.
func containerResources(c *Container, spec *specs.Spec) error {
	limits := Resources(c.Config.GetLinux().GetResources(), c.Machine)
	if base := spec.Linux.Resources; base != nil {
		limits = onBase(base, limits)
		DropUnsupported(limits, c.Machine)
	}
	if c.PidsLimit > 0 && slices.Contains(c.Machine.Controllers, "pids") {
		limits.Pids = &specs.LinuxPids{Limit: &c.PidsLimit}
	}
	spec.Linux.Resources = limits
	return nil
}

// onBase gives base with what is specified in asked in its place.
func onBase(base, asked *specs.LinuxResources) *specs.LinuxResources {
	if base.CPU == nil {
		base.CPU = &specs.LinuxCPU{}
	}
	replace(&base.CPU.Shares, asked.CPU.Shares)
	replace(&base.CPU.Quota, asked.CPU.Quota)
	replace(&base.CPU.Period, asked.CPU.Period)
	base.CPU.Cpus, base.CPU.Mems = cmp.Or(asked.CPU.Cpus, base.CPU.Cpus), cmp.Or(asked.CPU.Mems, base.CPU.Mems)
	if base.Memory == nil {
		base.Memory = &specs.LinuxMemory{}
	}
	if asked.Memory != nil {
		replace(&base.Memory.Limit, asked.Memory.Limit)
		replace(&base.Memory.Swap, asked.Memory.Swap)
	}
	for _, limit := range asked.HugepageLimits {
		base.HugepageLimits = slices.DeleteFunc(base.HugepageLimits, func(old specs.LinuxHugepageLimit) bool { return old.Pagesize == limit.Pagesize })
		base.HugepageLimits = append(base.HugepageLimits, limit)
	}
	if base.Unified == nil {
		base.Unified = asked.Unified
	}
	maps.Copy(base.Unified, asked.Unified)
	return base
}

func replace[T any](in **T, by *T) {
	if by != nil {
		*in = by
	}
}

// Resources are the limits of a container, at its creation or for an update:
// what is zero in the CRI is not specified. What this machine has no
// controller for is left out.
func Resources(r *runtimeapi.LinuxContainerResources, m machine.Machine) *specs.LinuxResources {
	limits := &specs.LinuxResources{
		CPU: &specs.LinuxCPU{
			Shares: specified(uint64(r.GetCpuShares())),
			Quota:  specified(r.GetCpuQuota()),
			Period: specified(uint64(r.GetCpuPeriod())),
			Cpus:   r.GetCpusetCpus(),
			Mems:   r.GetCpusetMems(),
		},
		Memory:  memory(r),
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, limit := range r.GetHugepageLimits() {
		limits.HugepageLimits = append(limits.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: limit.GetPageSize(), Limit: limit.GetLimit()})
	}
	DropUnsupported(limits, m)
	return limits
}

// memory: the swap limit counts memory and swap together. Without one of its
// own a container with a memory limit gets no swap, as in containerd.
func memory(r *runtimeapi.LinuxContainerResources) *specs.LinuxMemory {
	m := &specs.LinuxMemory{Limit: specified(r.GetMemoryLimitInBytes()), Swap: specified(r.GetMemorySwapLimitInBytes())}
	if m.Swap == nil {
		m.Swap = specified(r.GetMemoryLimitInBytes())
	}
	return m
}

func specified[N int64 | uint64](value N) *N {
	if value == 0 {
		return nil
	}
	return &value
}

// CgroupsPath is the cgroup of a container below the pod's parent, in the
// words of runtime-spec: a path for the driver cgroupfs, slice:prefix:name for
// systemd, which makes the scope prefix-name.scope of it.
func CgroupsPath(parent, prefix, id string, systemd bool) string {
	if systemd {
		return path.Base(parent) + ":" + strings.TrimSuffix(prefix, "-") + ":" + id
	}
	return path.Join("/", parent, prefix+id)
}
