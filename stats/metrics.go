package stats

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fscommon"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Metrics are those of pods and their containers, without what has ended or cannot be read.
func (m *Meter) Metrics(ctx context.Context, pods []Pod) []*runtimeapi.PodSandboxMetrics {
	m.refresh(ctx, layerWait, containersOf(pods)...)
	list := make([]*runtimeapi.PodSandboxMetrics, 0, len(pods))
	for _, p := range pods {
		list = append(list, m.podMetrics(p))
	}
	return list
}

func (m *Meter) podMetrics(p Pod) *runtimeapi.PodSandboxMetrics {
	metadata := p.Attributes.GetMetadata()
	pod := &metrics{base: []string{"", p.Cgroups[0], "", p.ID, metadata.GetNamespace(), metadata.GetName()}}
	m.cgroupMetrics(p, pod)
	m.networkMetrics(p, pod)
	answer := &runtimeapi.PodSandboxMetrics{PodSandboxId: p.ID, Metrics: pod.list}
	for _, c := range p.Containers {
		container := &metrics{base: []string{
			c.Attributes.GetMetadata().GetName(), c.Cgroup, c.Image, c.ID, metadata.GetNamespace(), metadata.GetName(),
		}}
		err := m.containerMetrics(c, container)
		switch {
		case err == nil:
			answer.ContainerMetrics = append(answer.ContainerMetrics, &runtimeapi.ContainerMetrics{ContainerId: c.ID, Metrics: container.list})
		case !errdefs.IsNotFound(err):
			m.logger.Warn("a container is left out of the metrics", "container", c.ID, "err", err)
		}
	}
	return answer
}

// cgroupMetrics are the pod's own, as cAdvisor has them: the rows whose container is "". A pod without a
// cgroup has the sums of its parts, where sums have a meaning.
func (m *Meter) cgroupMetrics(p Pod, to *metrics) {
	used, err := m.readUsage(p.ID, forMetrics, p.Cgroups...)
	if errdefs.IsNotFound(err) {
		return
	}
	if err != nil {
		m.logger.Warn("a pod's cgroup is left out of the metrics", "sandbox", p.ID, "err", err)
		return
	}
	to.addUsage(used)
	to.addPressure(used)
	if len(p.Cgroups) == 1 {
		to.addCPU(used)
		to.addMemory(m.hierarchies, p.Cgroups[0], used)
		to.addDevices(used)
	}
}

func (m *Meter) containerMetrics(c Container, to *metrics) error {
	used, err := m.readUsage(c.ID, forMetrics, c.Cgroup)
	if err != nil {
		return err
	}
	to.addUsage(used)
	to.addPressure(used)
	to.addCPU(used)
	to.addMemory(m.hierarchies, c.Cgroup, used)
	for size, pages := range used.HugetlbStats {
		to.add("container_hugetlb_usage_bytes", pages.Usage, size)
		if pages.MaxUsage > 0 { // version 2 keeps none
			to.add("container_hugetlb_max_usage_bytes", pages.MaxUsage, size)
		}
	}
	to.addDevices(used)
	to.addProcesses(m.hierarchies.dir("pids", c.Cgroup), used)
	m.addLayer(c, to)
	to.addSpec(c)
	return nil
}

func seconds(d time.Duration) uint64 { return uint64(d / time.Second) }

func (m *metrics) addUsage(used *usage) {
	m.add("container_cpu_usage_seconds_total", seconds(time.Duration(used.CpuStats.CpuUsage.TotalUsage)), "total")
	if memory := used.memory; memory != nil {
		m.add("container_memory_usage_bytes", memory.usage)
		m.add("container_memory_working_set_bytes", memory.workingSet())
		m.add("container_memory_rss", memory.anon)
		m.add("container_memory_total_active_file_bytes", memory.activeFile)
		m.add("container_memory_total_inactive_file_bytes", memory.inactiveFile)
		m.add("container_memory_failures_total", memory.faults, "pgfault", "hierarchy")
		m.add("container_memory_failures_total", memory.major, "pgmajfault", "hierarchy")
	}
	if used.swap != nil {
		m.add("container_memory_swap", used.swap.usage)
	}
	if threads := used.PidsStats.Current; threads > 0 {
		m.add("container_threads", threads)
	}
	m.add("container_last_seen", uint64(time.Now().Unix()))
}

func (m *metrics) addPressure(used *usage) {
	for name, pressure := range map[string]*cgroups.PSIStats{"cpu": used.CpuStats.PSI, "memory": used.MemoryStats.PSI, "io": used.BlkioStats.PSI} {
		if pressure == nil {
			continue
		}
		m.add("container_pressure_"+name+"_waiting_seconds_total", seconds(time.Duration(pressure.Some.Total)*time.Microsecond))
		m.add("container_pressure_"+name+"_stalled_seconds_total", seconds(time.Duration(pressure.Full.Total)*time.Microsecond))
	}
}

func (m *Meter) addLayer(c Container, to *metrics) {
	used := m.layer(c.ID)
	if used.Time.IsZero() {
		return
	}
	to.add("container_fs_usage_bytes", used.Bytes, used.Mountpoint)
	var fs unix.Statfs_t
	if err := unix.Statfs(used.Mountpoint, &fs); err != nil {
		m.logger.Warn("a file system cannot be measured", "path", used.Mountpoint, "err", err)
		return
	}
	to.add("container_fs_limit_bytes", fs.Blocks*uint64(fs.Bsize), used.Mountpoint)
	to.add("container_fs_inodes_free", fs.Ffree, used.Mountpoint)
	to.add("container_fs_inodes_total", fs.Files, used.Mountpoint)
}

// addSpec has the kernel's defaults where nothing is asked for (sched-bwc.rst, cgroups(7)).
func (m *metrics) addSpec(c Container) {
	resources := c.Resources
	m.add("container_start_time_seconds", seconds(time.Duration(c.StartedAt)))
	m.add("container_spec_cpu_period", positive(resources.GetCpuPeriod(), 100_000))
	m.add("container_spec_cpu_shares", positive(resources.GetCpuShares(), 1024))
	if quota := resources.GetCpuQuota(); quota > 0 {
		m.add("container_spec_cpu_quota", uint64(quota))
	}
	m.add("container_spec_memory_limit_bytes", wholePages(resources.GetMemoryLimitInBytes()))
	m.add("container_spec_memory_swap_limit_bytes", wholePages(resources.GetMemorySwapLimitInBytes()))
}

// wholePages rounds a limit as the kernel does (page_counter_memparse).
func wholePages(limit int64) uint64 {
	page := uint64(os.Getpagesize())
	return positive(limit, 0) / page * page
}

func positive(asked int64, otherwise uint64) uint64 {
	if asked > 0 {
		return uint64(asked)
	}
	return otherwise
}

func (m *Meter) networkMetrics(p Pod, to *metrics) {
	if p.Netns == "" {
		return
	}
	links, err := listLinks(p.Netns)
	if err != nil {
		m.logger.Warn("a pod's network is left out of the metrics", "sandbox", p.ID, "err", err)
		return
	}
	for _, a := range links {
		s := a.Statistics
		to.add("container_network_receive_bytes_total", s.RxBytes, a.Name)
		to.add("container_network_receive_errors_total", s.RxErrors, a.Name)
		to.add("container_network_receive_packets_total", s.RxPackets, a.Name)
		to.add("container_network_receive_packets_dropped_total", s.RxDropped, a.Name)
		to.add("container_network_transmit_bytes_total", s.TxBytes, a.Name)
		to.add("container_network_transmit_errors_total", s.TxErrors, a.Name)
		to.add("container_network_transmit_packets_total", s.TxPackets, a.Name)
		to.add("container_network_transmit_packets_dropped_total", s.TxDropped, a.Name)
	}
}

// descriptor is one metric under cAdvisor's name. labels follow baseLabels.
type descriptor struct {
	name, help string
	kind       runtimeapi.MetricType
	labels     []string
}

const (
	counter = runtimeapi.MetricType_COUNTER
	gauge   = runtimeapi.MetricType_GAUGE
)

var baseLabels = []string{"container", "id", "image", "name", "namespace", "pod"}

// descriptors are all metrics. The CRI has whole numbers, so seconds are rounded down.
var descriptors = []descriptor{
	{"container_cpu_usage_seconds_total", "Cpu time used.", counter, []string{"cpu"}},
	{"container_cpu_user_seconds_total", "Cpu time used in user mode.", counter, nil},
	{"container_cpu_system_seconds_total", "Cpu time used in the kernel.", counter, nil},
	{"container_cpu_cfs_periods_total", "Periods of the cpu limit that have passed.", counter, nil},
	{"container_cpu_cfs_throttled_periods_total", "Periods in which the cpu limit was reached.", counter, nil},
	{"container_cpu_cfs_throttled_seconds_total", "Time that the cpu limit has held up.", counter, nil},
	{"container_memory_usage_bytes", "Memory used, all of it.", gauge, nil},
	{"container_memory_working_set_bytes", "Memory used, without inactive files.", gauge, nil},
	{"container_memory_rss", "Anonymous memory.", gauge, nil},
	{"container_memory_total_active_file_bytes", "Page cache that was used again of late.", gauge, nil},
	{"container_memory_total_inactive_file_bytes", "Page cache that the kernel takes back first.", gauge, nil},
	{"container_memory_swap", "Swap used.", gauge, nil},
	{"container_memory_cache", "Page cache.", gauge, nil},
	{"container_memory_mapped_file", "Files mapped into memory.", gauge, nil},
	{"container_memory_kernel_usage", "Memory that the kernel uses for the container.", gauge, nil},
	{"container_memory_max_usage_bytes", "The most memory that was ever used.", gauge, nil},
	{"container_memory_failcnt", "How often the memory limit was reached.", counter, nil},
	{"container_memory_failures_total", "Page faults.", counter, []string{"failure_type", "scope"}},
	{"container_hugetlb_usage_bytes", "Memory in huge pages.", gauge, []string{"pagesize"}},
	{"container_hugetlb_max_usage_bytes", "The most memory in huge pages that was ever used.", gauge, []string{"pagesize"}},
	{"container_oom_events_total", "Processes killed for want of memory.", counter, nil},
	{"container_processes", "Processes.", gauge, nil},
	{"container_threads", "Threads.", gauge, nil},
	{"container_threads_max", "The most threads allowed, 0 for no limit.", gauge, nil},
	{"container_ulimits_soft", "Soft limits of the container's first process.", gauge, []string{"ulimit"}},
	{"container_file_descriptors", "Open files.", gauge, nil},
	{"container_sockets", "Open sockets.", gauge, nil},
	{"container_fs_usage_bytes", "Bytes of the writable layer.", gauge, []string{"device"}},
	{"container_fs_limit_bytes", "Size of the writable layer's file system.", gauge, []string{"device"}},
	{"container_fs_inodes_free", "Free inodes of the writable layer's file system.", gauge, []string{"device"}},
	{"container_fs_inodes_total", "Inodes of the writable layer's file system.", gauge, []string{"device"}},
	{"container_blkio_device_usage_total", "Bytes read from and written to a device.", counter, []string{"device", "major", "minor", "operation"}},
	{"container_fs_reads_bytes_total", "Bytes read from a device.", counter, []string{"device"}},
	{"container_fs_reads_total", "Reads from a device.", counter, []string{"device"}},
	{"container_fs_writes_bytes_total", "Bytes written to a device.", counter, []string{"device"}},
	{"container_fs_writes_total", "Writes to a device.", counter, []string{"device"}},
	{"container_pressure_cpu_waiting_seconds_total", "Time that some tasks waited for a cpu.", counter, nil},
	{"container_pressure_cpu_stalled_seconds_total", "Time that all tasks waited for a cpu.", counter, nil},
	{"container_pressure_memory_waiting_seconds_total", "Time that some tasks waited for memory.", counter, nil},
	{"container_pressure_memory_stalled_seconds_total", "Time that all tasks waited for memory.", counter, nil},
	{"container_pressure_io_waiting_seconds_total", "Time that some tasks waited for a device.", counter, nil},
	{"container_pressure_io_stalled_seconds_total", "Time that all tasks waited for a device.", counter, nil},
	{"container_last_seen", "When the container was last seen, in seconds since 1970.", gauge, nil},
	{"container_start_time_seconds", "When the container was started, in seconds since 1970.", gauge, nil},
	{"container_spec_cpu_period", "Period of the cpu limit, in microseconds.", gauge, nil},
	{"container_spec_cpu_quota", "Cpu limit, in microseconds of each period.", gauge, nil},
	{"container_spec_cpu_shares", "Share of the cpu.", gauge, nil},
	{"container_spec_memory_limit_bytes", "Memory limit, 0 for none.", gauge, nil},
	{"container_spec_memory_reservation_limit_bytes", "Memory that is kept for the container, 0 for none.", gauge, nil},
	{"container_spec_memory_swap_limit_bytes", "Limit of memory and swap together, 0 for none.", gauge, nil},
	{"container_network_receive_bytes_total", "Bytes received.", counter, []string{"interface"}},
	{"container_network_receive_errors_total", "Errors while receiving.", counter, []string{"interface"}},
	{"container_network_receive_packets_total", "Packets received.", counter, []string{"interface"}},
	{"container_network_receive_packets_dropped_total", "Packets dropped while receiving.", counter, []string{"interface"}},
	{"container_network_transmit_bytes_total", "Bytes sent.", counter, []string{"interface"}},
	{"container_network_transmit_errors_total", "Errors while sending.", counter, []string{"interface"}},
	{"container_network_transmit_packets_total", "Packets sent.", counter, []string{"interface"}},
	{"container_network_transmit_packets_dropped_total", "Packets dropped while sending.", counter, []string{"interface"}},
}

// Descriptors are all metrics that [Meter.Metrics] may give.
func Descriptors() (list []*runtimeapi.MetricDescriptor) {
	for _, d := range descriptors {
		list = append(list, &runtimeapi.MetricDescriptor{Name: d.name, Help: d.help, LabelKeys: slices.Concat(baseLabels, d.labels)})
	}
	return list
}

type metrics struct {
	base []string // the values of baseLabels
	list []*runtimeapi.Metric
}

// add adds a value measured now, with the values of its own labels.
func (m *metrics) add(name string, v uint64, labels ...string) {
	described := descriptors[slices.IndexFunc(descriptors, func(d descriptor) bool { return d.name == name })]
	m.list = append(m.list, &runtimeapi.Metric{
		Name: name, MetricType: described.kind, Value: value(v), Timestamp: time.Now().UnixNano(), LabelValues: slices.Concat(m.base, labels),
	})
}

func (m *metrics) addCPU(used *usage) {
	cpu := used.CpuStats
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
	directory, stats := h.dir("memory", path), used.MemoryStats
	// number adds what the library does not read, where the kernel has it.
	number := func(metric string, value uint64, err error) {
		if err == nil {
			m.add(metric, value)
		}
	}
	if most := stats.Usage.MaxUsage; most > 0 {
		m.add("container_memory_max_usage_bytes", most)
	}
	if h.unified != "" {
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

func (m *metrics) addProcesses(directory string, used *usage) {
	m.add("container_threads_max", used.PidsStats.Limit)
	pids, err := cgroups.GetAllPids(directory)
	if err != nil {
		return
	}
	m.add("container_processes", uint64(len(pids)))
	// The CRI has no number for "no limit".
	var limit unix.Rlimit
	if len(pids) > 0 && unix.Prlimit(pids[0], unix.RLIMIT_NOFILE, nil, &limit) == nil && limit.Cur != unix.RLIM_INFINITY {
		m.add("container_ulimits_soft", limit.Cur, "max_open_files")
	}
	// A process takes some ten microseconds, a file one, and a part of them would be a wrong number.
	const maxProcesses, maxFiles = 1000, 1 << 16
	if len(pids) > maxProcesses {
		return
	}
	var files, sockets int
	for _, pid := range pids {
		f, s := openFiles(strconv.Itoa(pid), maxFiles-files)
		if files, sockets = files+f, sockets+s; files > maxFiles {
			return
		}
	}
	m.add("container_file_descriptors", uint64(files))
	m.add("container_sockets", uint64(sockets))
}

// openFiles counts what a process has open, up to one more than most.
func openFiles(pid string, most int) (files, sockets int) {
	directory, err := os.Open("/proc/" + pid + "/fd")
	if err != nil {
		return 0, 0
	}
	defer directory.Close()
	names, _ := directory.Readdirnames(most + 1)
	for _, name := range names {
		if target, err := os.Readlink(filepath.Join(directory.Name(), name)); err == nil && strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	return len(names), sockets
}

// addDevices adds the reads and writes. Devices without any have no row.
func (m *metrics) addDevices(used *usage) {
	for _, kind := range []struct {
		entries       []cgroups.BlkioStatEntry
		reads, writes string
		usage         bool
	}{
		{used.BlkioStats.IoServiceBytesRecursive, "container_fs_reads_bytes_total", "container_fs_writes_bytes_total", true},
		{used.BlkioStats.IoServicedRecursive, "container_fs_reads_total", "container_fs_writes_total", false},
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
	device, err := os.Readlink("/sys/dev/block/" + number)
	if err != nil {
		return number
	}
	return "/dev/" + strings.ReplaceAll(filepath.Base(device), "!", "/")
}
