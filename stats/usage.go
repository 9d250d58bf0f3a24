package stats

import (
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// usage is what a cgroup uses. A part that is nil could not be read: the
// controller is not there.
type usage struct {
	cpu       *cpu
	memory    *memory
	swap      *swap
	processes *processes
	// Pressure Stall Information, where the kernel has it.
	cpuPressure, memoryPressure, ioPressure *runtimeapi.PsiStats
}

// cpu is the time that all tasks have run, on all cores together.
type cpu struct {
	at    time.Time
	total time.Duration
}

// memory is in bytes. limit is unlimited, or more, if there is none.
type memory struct {
	at                 time.Time
	usage, limit       uint64
	inactiveFile, anon uint64
	activeFile         uint64
	faults, major      uint64
}

// swap is in bytes; limit is of swap alone.
type swap struct {
	at           time.Time
	usage, limit uint64
}

type processes struct {
	at    time.Time
	count uint64
}

// unlimited: version 1 says "no limit" with the largest signed number, rounded
// to pages, and no machine has half of that.
const unlimited = 1 << 62

// workingSet is what the kubelet evicts by: what cannot easily be given back.
func (m *memory) workingSet() uint64 { return m.usage - min(m.usage, m.inactiveFile) }

// readUsage measures a cgroup, errdefs.ErrNotFound if there is none. What the
// reader could not read is missing; an error says that nothing could be read.
func readUsage(h hierarchies, path string, r *reader) (*usage, error) {
	u := &usage{}
	u.readCPU(h, path, r)
	u.readMemory(h, path, r)
	u.readProcesses(h, path, r)
	u.readPressure(h, path, r)
	if u.cpu == nil && u.memory == nil {
		if err := r.failed(); err != nil {
			return nil, fmt.Errorf("measure cgroup %s: %w", path, err)
		}
		return nil, fmt.Errorf("measure cgroup %s: it has no cpu and no memory controller, or is gone: %w", path, errdefs.ErrNotFound)
	}
	return u, nil
}

func (u *usage) readCPU(h hierarchies, path string, r *reader) {
	if version2(h.cpuacct) {
		var micros uint64
		if r.table(dir(h.unified, path), "cpu.stat", map[string]*uint64{"usage_usec": &micros}) {
			u.cpu = &cpu{at: time.Now(), total: time.Duration(micros) * time.Microsecond}
		}
		return
	}
	if nanos, found := r.number(dir(h.cpuacct, path), "cpuacct.usage"); found {
		u.cpu = &cpu{at: time.Now(), total: time.Duration(nanos)}
	}
}

func (u *usage) readMemory(h hierarchies, path string, r *reader) {
	if version2(h.memory) {
		u.readMemory2(dir(h.unified, path), r)
		return
	}
	u.readMemory1(dir(h.memory, path), r)
}

// readMemory1: usage and limits are of the cgroup and all below it, so the rows
// of memory.stat that begin with total_ belong to them.
func (u *usage) readMemory1(dir string, r *reader) {
	bytes, found := r.number(dir, "memory.usage_in_bytes")
	if !found {
		return
	}
	m := &memory{at: time.Now(), usage: bytes, limit: unlimited}
	s := &swap{at: m.at}
	both := uint64(unlimited)
	if !r.table(dir, "memory.stat", map[string]*uint64{
		"hierarchical_memory_limit": &m.limit, "hierarchical_memsw_limit": &both,
		"total_inactive_file": &m.inactiveFile, "total_active_file": &m.activeFile, "total_rss": &m.anon,
		"total_pgfault": &m.faults, "total_pgmajfault": &m.major, "total_swap": &s.usage,
	}) {
		return
	}
	s.limit = unlimited
	if both < unlimited {
		s.limit = both - min(both, m.limit)
	}
	u.memory, u.swap = m, s
}

func (u *usage) readMemory2(dir string, r *reader) {
	bytes, found := r.number(dir, "memory.current")
	if !found {
		return
	}
	m := &memory{at: time.Now(), usage: bytes, limit: unlimited}
	if !r.table(dir, "memory.stat", map[string]*uint64{
		"inactive_file": &m.inactiveFile, "active_file": &m.activeFile, "anon": &m.anon, "pgfault": &m.faults, "pgmajfault": &m.major,
	}) {
		return
	}
	if limit, found := r.number(dir, "memory.max"); found {
		m.limit = limit
	}
	u.memory = m
	if bytes, found = r.number(dir, "memory.swap.current"); !found {
		return // the kernel has no swap accounting
	}
	u.swap = &swap{at: m.at, usage: bytes, limit: unlimited}
	if limit, found := r.number(dir, "memory.swap.max"); found {
		u.swap.limit = limit
	}
}

func (u *usage) readProcesses(h hierarchies, path string, r *reader) {
	hierarchy := h.pids
	if version2(hierarchy) {
		hierarchy = h.unified
	}
	if count, found := r.number(dir(hierarchy, path), "pids.current"); found {
		u.processes = &processes{at: time.Now(), count: count}
	}
}

// cpuUsage has a rate from the second sample on; samples are kept by the key.
func (m *Meter) cpuUsage(key string, used *usage) *runtimeapi.CpuUsage {
	if used.cpu == nil {
		return nil
	}
	answer := &runtimeapi.CpuUsage{
		Timestamp:            used.cpu.at.UnixNano(),
		UsageCoreNanoSeconds: value(uint64(used.cpu.total)),
		Psi:                  used.cpuPressure,
	}
	if nanoCores, known := m.rates.rate(key, *used.cpu); known {
		answer.UsageNanoCores = value(nanoCores)
	}
	return answer
}

func (u *usage) memoryUsage() *runtimeapi.MemoryUsage {
	m := u.memory
	if m == nil {
		return nil
	}
	return &runtimeapi.MemoryUsage{
		Timestamp:       m.at.UnixNano(),
		WorkingSetBytes: value(m.workingSet()),
		AvailableBytes:  available(m.limit, m.workingSet()),
		UsageBytes:      value(m.usage),
		RssBytes:        value(m.anon),
		PageFaults:      value(m.faults),
		MajorPageFaults: value(m.major),
		Psi:             u.memoryPressure,
	}
}

// available is what is left of a limit, nil if there is none.
func available(limit, used uint64) *runtimeapi.UInt64Value {
	if limit >= unlimited {
		return nil
	}
	return value(limit - min(limit, used))
}

func (u *usage) swapUsage() *runtimeapi.SwapUsage {
	s := u.swap
	if s == nil {
		return nil
	}
	return &runtimeapi.SwapUsage{
		Timestamp:          s.at.UnixNano(),
		SwapAvailableBytes: available(s.limit, s.usage),
		SwapUsageBytes:     value(s.usage),
	}
}

func (u *usage) processUsage() *runtimeapi.ProcessUsage {
	if u.processes == nil {
		return nil
	}
	return &runtimeapi.ProcessUsage{Timestamp: u.processes.at.UnixNano(), ProcessCount: value(u.processes.count)}
}

func (u *usage) ioUsage() *runtimeapi.IoUsage {
	if u.ioPressure == nil {
		return nil
	}
	return &runtimeapi.IoUsage{Timestamp: time.Now().UnixNano(), Psi: u.ioPressure}
}

// writableLayer is nil before the first measurement has ended.
func (m *Meter) writableLayer(id string) *runtimeapi.FilesystemUsage {
	used, measured := m.layers.of(id)
	if !measured {
		return nil
	}
	return &runtimeapi.FilesystemUsage{
		Timestamp:  used.Time.UnixNano(),
		FsId:       &runtimeapi.FilesystemIdentifier{Mountpoint: used.Mountpoint},
		UsedBytes:  value(used.Bytes),
		InodesUsed: value(used.Inodes),
	}
}
