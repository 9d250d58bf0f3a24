package stats

import (
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// descriptor is one metric, by the name that cAdvisor gave it, with the labels
// that it has besides those of every metric.
type descriptor struct {
	name, help string
	kind       runtimeapi.MetricType
	labels     []string
}

const (
	counter = runtimeapi.MetricType_COUNTER
	gauge   = runtimeapi.MetricType_GAUGE
)

// baseLabels are those of every metric, in this order.
func baseLabels() []string { return []string{"container", "id", "image", "name", "namespace", "pod"} }

// descriptors are all metrics. Values are whole numbers in the CRI, so seconds
// are rounded down.
func descriptors() []descriptor {
	return slices.Concat(usageDescriptors(), limitDescriptors(), networkDescriptors())
}

func usageDescriptors() []descriptor {
	device := []string{"device"}
	return []descriptor{
		{"container_cpu_usage_seconds_total", "Cpu time used.", counter, []string{"cpu"}},
		{"container_cpu_user_seconds_total", "Cpu time used in user mode.", counter, nil},
		{"container_cpu_system_seconds_total", "Cpu time used in the kernel.", counter, nil},
		{"container_cpu_cfs_periods_total", "Periods of the cpu limit that have passed.", counter, nil},
		{"container_cpu_cfs_throttled_periods_total", "Periods in which the cpu limit was reached.", counter, nil},
		{"container_cpu_cfs_throttled_seconds_total", "Time that the cpu limit has held up.", counter, nil},
		{"container_memory_usage_bytes", "Memory used, all of it.", gauge, nil},
		{"container_memory_working_set_bytes", "Memory used, without inactive files.", gauge, nil},
		{"container_memory_rss", "Anonymous memory.", gauge, nil},
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
		{"container_fs_usage_bytes", "Bytes of the writable layer.", gauge, device},
		{"container_fs_limit_bytes", "Size of the writable layer's file system.", gauge, device},
		{"container_fs_inodes_free", "Free inodes of the writable layer's file system.", gauge, device},
		{"container_fs_inodes_total", "Inodes of the writable layer's file system.", gauge, device},
		{"container_blkio_device_usage_total", "Bytes read from and written to a device.", counter, []string{"device", "major", "minor", "operation"}},
		{"container_fs_reads_bytes_total", "Bytes read from a device.", counter, device},
		{"container_fs_reads_total", "Reads from a device.", counter, device},
		{"container_fs_writes_bytes_total", "Bytes written to a device.", counter, device},
		{"container_fs_writes_total", "Writes to a device.", counter, device},
		{"container_pressure_cpu_waiting_seconds_total", "Time that some tasks waited for a cpu.", counter, nil},
		{"container_pressure_cpu_stalled_seconds_total", "Time that all tasks waited for a cpu.", counter, nil},
		{"container_pressure_memory_waiting_seconds_total", "Time that some tasks waited for memory.", counter, nil},
		{"container_pressure_memory_stalled_seconds_total", "Time that all tasks waited for memory.", counter, nil},
		{"container_pressure_io_waiting_seconds_total", "Time that some tasks waited for a device.", counter, nil},
		{"container_pressure_io_stalled_seconds_total", "Time that all tasks waited for a device.", counter, nil},
		{"container_last_seen", "When the container was last seen, in seconds since 1970.", gauge, nil},
		{"container_start_time_seconds", "When the container was started, in seconds since 1970.", gauge, nil},
	}
}

func limitDescriptors() []descriptor {
	return []descriptor{
		{"container_spec_cpu_period", "Period of the cpu limit, in microseconds.", gauge, nil},
		{"container_spec_cpu_quota", "Cpu limit, in microseconds of each period.", gauge, nil},
		{"container_spec_cpu_shares", "Share of the cpu.", gauge, nil},
		{"container_spec_memory_limit_bytes", "Memory limit, 0 for none.", gauge, nil},
		{"container_spec_memory_reservation_limit_bytes", "Memory that is kept for the container, 0 for none.", gauge, nil},
		{"container_spec_memory_swap_limit_bytes", "Limit of memory and swap together, 0 for none.", gauge, nil},
	}
}

func networkDescriptors() []descriptor {
	network := []string{"interface"}
	return []descriptor{
		{"container_network_receive_bytes_total", "Bytes received.", counter, network},
		{"container_network_receive_errors_total", "Errors while receiving.", counter, network},
		{"container_network_receive_packets_total", "Packets received.", counter, network},
		{"container_network_receive_packets_dropped_total", "Packets dropped while receiving.", counter, network},
		{"container_network_transmit_bytes_total", "Bytes sent.", counter, network},
		{"container_network_transmit_errors_total", "Errors while sending.", counter, network},
		{"container_network_transmit_packets_total", "Packets sent.", counter, network},
		{"container_network_transmit_packets_dropped_total", "Packets dropped while sending.", counter, network},
	}
}

// Descriptors are all metrics that [Meter.Metrics] may give.
func Descriptors() []*runtimeapi.MetricDescriptor {
	var list []*runtimeapi.MetricDescriptor
	for _, d := range descriptors() {
		list = append(list, &runtimeapi.MetricDescriptor{Name: d.name, Help: d.help, LabelKeys: append(baseLabels(), d.labels...)})
	}
	return list
}

// metrics are those of one container, or of one pod.
type metrics struct {
	kinds map[string]runtimeapi.MetricType
	// base are the values of baseLabels.
	base []string
	list []*runtimeapi.Metric
}

// add adds a value measured now, with the values of its own labels.
func (m *metrics) add(name string, v uint64, labels ...string) {
	m.list = append(m.list, &runtimeapi.Metric{
		Name: name, MetricType: m.kinds[name], Value: value(v), Timestamp: time.Now().UnixNano(),
		LabelValues: append(append([]string{}, m.base...), labels...),
	})
}

func kindsOfMetrics() map[string]runtimeapi.MetricType {
	kinds := make(map[string]runtimeapi.MetricType)
	for _, d := range descriptors() {
		kinds[d.name] = d.kind
	}
	return kinds
}
