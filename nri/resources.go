package nri

import (
	"cmp"
	"maps"
	"slices"

	"github.com/containerd/nri/pkg/api"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// fromCRI turns resources of the CRI, where zero says nothing, into NRI's.
func fromCRI(r *runtimeapi.LinuxContainerResources) *api.LinuxResources {
	if r == nil {
		return nil
	}
	to := &api.LinuxResources{
		Cpu:     &api.LinuxCPU{Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems()},
		Memory:  &api.LinuxMemory{},
		Unified: maps.Clone(r.GetUnified()),
	}
	if v := r.GetCpuShares(); v != 0 {
		to.Cpu.Shares = api.UInt64(v)
	}
	if v := r.GetCpuQuota(); v != 0 {
		to.Cpu.Quota = api.Int64(v)
	}
	if v := r.GetCpuPeriod(); v != 0 {
		to.Cpu.Period = api.UInt64(v)
	}
	if v := r.GetMemoryLimitInBytes(); v != 0 {
		to.Memory.Limit = api.Int64(v)
	}
	if v := r.GetMemorySwapLimitInBytes(); v != 0 {
		to.Memory.Swap = api.Int64(v)
	}
	for _, limit := range r.GetHugepageLimits() {
		to.HugepageLimits = append(to.HugepageLimits, &api.HugepageLimit{PageSize: limit.GetPageSize(), Limit: limit.GetLimit()})
	}
	return to
}

// toCRI turns resources of NRI into the CRI's. What the CRI cannot change in a
// container that is there is left out, and said.
func (p *Plugins) toCRI(id string, r *api.LinuxResources) *runtimeapi.LinuxContainerResources {
	cpu, memory := r.GetCpu(), r.GetMemory()
	to := &runtimeapi.LinuxContainerResources{
		CpuShares: int64(cpu.GetShares().GetValue()), CpuQuota: cpu.GetQuota().GetValue(), CpuPeriod: int64(cpu.GetPeriod().GetValue()),
		CpusetCpus: cpu.GetCpus(), CpusetMems: cpu.GetMems(),
		MemoryLimitInBytes: memory.GetLimit().GetValue(), MemorySwapLimitInBytes: memory.GetSwap().GetValue(),
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, limit := range r.GetHugepageLimits() {
		to.HugepageLimits = append(to.HugepageLimits, &runtimeapi.HugepageLimit{PageSize: limit.GetPageSize(), Limit: limit.GetLimit()})
	}
	if r.GetPids() != nil || r.GetBlockioClass() != nil || r.GetRdtClass() != nil || memory.GetReservation() != nil || memory.GetSwappiness() != nil ||
		memory.GetDisableOomKiller() != nil || cpu.GetRealtimePeriod() != nil || cpu.GetRealtimeRuntime() != nil {
		p.options.Logger.Warn("an NRI plugin wants to update what only a new container can get: pids, classes, reservation, swappiness, the OOM killer or realtime; this part is left out",
			"container", id)
	}
	return to
}

// sortedByAge are the values of a map, the oldest first.
func sortedByAge[T any](from map[string]T, age func(T) int64) []T {
	return slices.SortedFunc(maps.Values(from), func(a, b T) int { return cmp.Compare(age(a), age(b)) })
}
