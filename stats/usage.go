package stats

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// usage is what a cgroup uses. A part that is nil could not be read: the
// controller is not there.
type usage struct {
	at     time.Time
	all    *cgroups.Stats
	cpu    *cpu
	memory *memory
	swap   *swap
	// incomplete says what could not be read.
	incomplete error
}

// cpu is the time that all tasks have run, on all cores together.
type cpu struct {
	at    time.Time
	total time.Duration
}

// memory is in bytes. limit is unlimited, or more, if there is none.
type memory struct {
	usage, limit             uint64
	inactiveFile, activeFile uint64
	anon, faults, major      uint64
}

// swap is in bytes; limit is of swap alone.
type swap struct{ usage, limit uint64 }

// unlimited: version 1 says "no limit" with the largest signed number, rounded
// to pages, and no machine has half of that.
const unlimited = 1 << 62

// workingSet is what the kubelet evicts by: what cannot easily be given back.
func (m *memory) workingSet() uint64 { return m.usage - min(m.usage, m.inactiveFile) }

// readUsage measures a cgroup, errdefs.ErrNotFound if there is none. What could not be
// read is missing; an error says that nothing could be read.
func readUsage(h hierarchies, path string, wanted cgroups.Controller) (*usage, error) {
	all, err := h.read(path, wanted)
	if all == nil {
		return nil, err
	}
	u := &usage{at: time.Now(), all: all, incomplete: err}
	if _, err := os.Stat(h.dir("cpuacct", path)); err == nil {
		u.cpu = &cpu{at: u.at, total: time.Duration(all.CpuStats.CpuUsage.TotalUsage)}
	}
	if len(all.MemoryStats.Stats) > 0 {
		u.takeMemory(h, path)
	}
	if u.cpu == nil && u.memory == nil {
		if !h.has(path) || err == nil {
			err = errdefs.ErrNotFound
		}
		return nil, fmt.Errorf("measure cgroup %s: it has no cpu and no memory controller, or is gone: %w", path, err)
	}
	return u, nil
}

// takeMemory: usage and limits are of the cgroup and all below it, so on version 1 the
// rows of memory.stat that begin with total_ belong to them.
func (u *usage) takeMemory(h hierarchies, path string) {
	stats := u.all.MemoryStats
	row, prefix, anon := stats.Stats, "", "anon"
	m := &memory{usage: stats.Usage.Usage, limit: stats.Usage.Limit}
	if h.version2("memory") {
		if _, err := os.Stat(filepath.Join(h.dir("memory", path), "memory.swap.current")); err == nil { // else the kernel does not count it
			u.swap = &swap{usage: stats.SwapOnlyUsage.Usage, limit: stats.SwapOnlyUsage.Limit}
		}
	} else {
		prefix, anon = "total_", "rss"
		m.limit = row["hierarchical_memory_limit"]
		u.swap = &swap{usage: row["total_swap"], limit: unlimited}
		if both, counted := row["hierarchical_memsw_limit"]; counted && both < unlimited {
			u.swap.limit = both - min(both, m.limit)
		}
	}
	m.inactiveFile, m.activeFile, m.anon = row[prefix+"inactive_file"], row[prefix+"active_file"], row[prefix+anon]
	m.faults, m.major = row[prefix+"pgfault"], row[prefix+"pgmajfault"]
	u.memory = m
}

// psi is what the kernel says of pressure, nil where it says nothing. It counts
// microseconds, and the API nanoseconds.
func psi(from *cgroups.PSIStats) *runtimeapi.PsiStats {
	if from == nil {
		return nil
	}
	data := func(d cgroups.PSIData) *runtimeapi.PsiData {
		return &runtimeapi.PsiData{Avg10: d.Avg10, Avg60: d.Avg60, Avg300: d.Avg300, Total: d.Total * uint64(time.Microsecond)}
	}
	return &runtimeapi.PsiStats{Some: data(from.Some), Full: data(from.Full)}
}

// cpuUsage has a rate from the second sample on; samples are kept by the key.
func (m *Meter) cpuUsage(key string, used *usage) *runtimeapi.CpuUsage {
	if used.cpu == nil {
		return nil
	}
	answer := &runtimeapi.CpuUsage{
		Timestamp:            used.at.UnixNano(),
		UsageCoreNanoSeconds: value(uint64(used.cpu.total)),
		Psi:                  psi(used.all.CpuStats.PSI),
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
		Timestamp:       u.at.UnixNano(),
		WorkingSetBytes: value(m.workingSet()),
		AvailableBytes:  available(m.limit, m.workingSet()),
		UsageBytes:      value(m.usage),
		RssBytes:        value(m.anon),
		PageFaults:      value(m.faults),
		MajorPageFaults: value(m.major),
		Psi:             psi(u.all.MemoryStats.PSI),
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
		Timestamp:          u.at.UnixNano(),
		SwapAvailableBytes: available(s.limit, s.usage),
		SwapUsageBytes:     value(s.usage),
	}
}

func (u *usage) processUsage() *runtimeapi.ProcessUsage {
	if u.all.PidsStats.Current == 0 {
		return nil
	}
	return &runtimeapi.ProcessUsage{Timestamp: u.at.UnixNano(), ProcessCount: value(u.all.PidsStats.Current)}
}

func (u *usage) ioUsage() *runtimeapi.IoUsage {
	if u.all.BlkioStats.PSI == nil {
		return nil
	}
	return &runtimeapi.IoUsage{Timestamp: u.at.UnixNano(), Psi: psi(u.all.BlkioStats.PSI)}
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
