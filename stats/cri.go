package stats

import (
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

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
