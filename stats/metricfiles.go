package stats

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fscommon"
	"golang.org/x/sys/unix"
)

func (m *metrics) addCPU(used *usage) {
	if used.cpu == nil {
		return
	}
	cpu := used.all.CpuStats
	m.add("container_cpu_user_seconds_total", seconds(time.Duration(cpu.CpuUsage.UsageInUsermode)))
	m.add("container_cpu_system_seconds_total", seconds(time.Duration(cpu.CpuUsage.UsageInKernelmode)))
	m.add("container_cpu_cfs_periods_total", cpu.ThrottlingData.Periods)
	m.add("container_cpu_cfs_throttled_periods_total", cpu.ThrottlingData.ThrottledPeriods)
	m.add("container_cpu_cfs_throttled_seconds_total", seconds(time.Duration(cpu.ThrottlingData.ThrottledTime)))
}

func (m *metrics) addMemory(h hierarchies, path string, used *usage) {
	if used.memory == nil {
		return
	}
	directory, stats := h.dir("memory", path), used.all.MemoryStats
	// number adds what the library does not read, where the kernel has it.
	number := func(metric string, value uint64, err error) {
		if err == nil {
			m.add(metric, value)
		}
	}
	if most := stats.Usage.MaxUsage; most > 0 {
		m.add("container_memory_max_usage_bytes", most)
	}
	if h.version2("memory") {
		m.add("container_memory_cache", stats.Stats["file"])
		m.add("container_memory_mapped_file", stats.Stats["file_mapped"])
		m.add("container_memory_kernel_usage", stats.Stats["kernel"])
		for row, metric := range map[string]string{"max": "container_memory_failcnt", "oom_kill": "container_oom_events_total"} {
			events, err := fscommon.GetValueByKey(directory, "memory.events", row)
			number(metric, events, err)
		}
		reserved, err := fscommon.GetCgroupParamUint(directory, "memory.min")
		number("container_spec_memory_reservation_limit_bytes", reserved, err)
		return
	}
	m.add("container_memory_cache", stats.Stats["total_cache"])
	m.add("container_memory_mapped_file", stats.Stats["total_mapped_file"])
	m.add("container_memory_kernel_usage", stats.KernelUsage.Usage)
	m.add("container_memory_failcnt", stats.Usage.Failcnt)
	killed, err := fscommon.GetValueByKey(directory, "memory.oom_control", "oom_kill")
	number("container_oom_events_total", killed, err)
	reserved, err := fscommon.GetCgroupParamUint(directory, "memory.soft_limit_in_bytes")
	if reserved >= unlimited {
		reserved = 0
	}
	number("container_spec_memory_reservation_limit_bytes", reserved, err)
}

// addHugePages adds what is used of each size of pages. Version 2 keeps no
// maximum.
func (m *metrics) addHugePages(used *usage) {
	for size, pages := range used.all.HugetlbStats {
		m.add("container_hugetlb_usage_bytes", pages.Usage, size)
		if pages.MaxUsage > 0 {
			m.add("container_hugetlb_max_usage_bytes", pages.MaxUsage, size)
		}
	}
}

// maxCounted is the most processes whose files are counted: a look at each takes
// some ten microseconds, and a container may have as many as its limit allows.
const maxCounted = 1000

func (m *metrics) addProcesses(directory string, used *usage) {
	m.add("container_threads_max", used.all.PidsStats.Limit)
	pids, err := cgroups.GetPids(directory)
	if err != nil {
		return
	}
	m.add("container_processes", uint64(len(pids)))
	if len(pids) > 0 {
		m.addUlimits(pids[0])
	}
	if len(pids) > maxCounted {
		return // a part of them would be a wrong number
	}
	var files, sockets uint64
	for _, pid := range pids {
		f, s := openFiles(strconv.Itoa(pid))
		files, sockets = files+f, sockets+s
	}
	m.add("container_file_descriptors", files)
	m.add("container_sockets", sockets)
}

// addUlimits adds the soft limit of open files, the one that cAdvisor has too,
// of the container's first process. None is added for no limit: a value of the
// CRI has no number for it.
func (m *metrics) addUlimits(pid int) {
	var limit unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit); err != nil || limit.Cur == unix.RLIM_INFINITY {
		return // it has ended
	}
	m.add("container_ulimits_soft", limit.Cur, "max_open_files")
}

// openFiles counts those of a process; one that has ended has none.
func openFiles(pid string) (files, sockets uint64) {
	directory := "/proc/" + pid + "/fd"
	entries, err := os.ReadDir(directory)
	if err != nil {
		return 0, 0
	}
	for _, entry := range entries {
		files++
		if target, err := os.Readlink(directory + "/" + entry.Name()); err == nil && strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	return files, sockets
}

// addDevices adds what was read and written. Devices without a transfer have no
// row.
func (m *metrics) addDevices(used *usage) {
	for _, kind := range []struct {
		entries       []cgroups.BlkioStatEntry
		reads, writes string
		usage         bool
	}{
		{used.all.BlkioStats.IoServiceBytesRecursive, "container_fs_reads_bytes_total", "container_fs_writes_bytes_total", true},
		{used.all.BlkioStats.IoServicedRecursive, "container_fs_reads_total", "container_fs_writes_total", false},
	} {
		for _, entry := range kind.entries {
			metric := map[string]string{"Read": kind.reads, "Write": kind.writes}[entry.Op]
			if metric == "" {
				continue // a part of the two, or their sum
			}
			major, minor := strconv.FormatUint(entry.Major, 10), strconv.FormatUint(entry.Minor, 10)
			name := deviceName(major + ":" + minor)
			if kind.usage {
				m.add("container_blkio_device_usage_total", entry.Value, name, major, minor, entry.Op)
			}
			m.add(metric, entry.Value, name)
		}
	}
}

// deviceName is "/dev/sda" for "8:0", or the number if sysfs does not know it.
func deviceName(number string) string {
	content, err := os.ReadFile("/sys/dev/block/" + number + "/uevent")
	if errors.Is(err, fs.ErrNotExist) {
		return number
	}
	for line := range strings.Lines(string(content)) {
		if name, found := strings.CutPrefix(strings.TrimSpace(line), "DEVNAME="); found {
			return "/dev/" + name
		}
	}
	return number
}
