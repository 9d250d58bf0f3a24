package stats

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// optional are the metrics that a container may have none of: it has used no
// device, has no limit, or the kernel has no pressure information.
func optional(name string) bool {
	return strings.HasPrefix(name, "container_pressure_") || strings.HasPrefix(name, "container_blkio_") ||
		strings.HasPrefix(name, "container_fs_reads_") || strings.HasPrefix(name, "container_fs_writes_") ||
		strings.HasPrefix(name, "container_hugetlb_") || name == "container_memory_swap"
}

// cri: ContainerMetrics.metrics MetricDescriptor.label_keys MetricDescriptor.name
// cri: PodSandboxMetrics.container_metrics
func TestEveryMetricIsDescribedAndMeasured(t *testing.T) {
	layers := t.TempDir()
	m := newMeter(t, directories(layers))
	path := makeCgroup(t, m.hierarchies, "metrics")
	must(t, os.Mkdir(filepath.Join(layers, "metrics"), 0o755))
	start(t, m.hierarchies, path, "hold "+filepath.Join(t.TempDir(), "file"))
	namespace := newNamespace(t)
	netns := fmt.Sprintf("/proc/%d/ns/net", namespace)
	addPair(t, netns)
	answer := m.Metrics(t.Context(), []Pod{{
		ID: "pod", Cgroups: []string{path}, Netns: netns, Attributes: &runtimeapi.PodSandboxAttributes{},
		Containers: []Container{
			{ID: "vanished", Cgroup: path + "/vanished"},
			{ID: "metrics", Cgroup: path, StartedAt: time.Now().UnixNano(), Resources: &runtimeapi.LinuxContainerResources{CpuQuota: 20000}},
		},
	}})
	if len(answer) != 1 || len(answer[0].GetContainerMetrics()) != 1 {
		t.Fatalf("the metrics are %v", answer)
	}
	found := make(map[string]*runtimeapi.Metric)
	for _, metric := range append(answer[0].GetMetrics(), answer[0].GetContainerMetrics()[0].GetMetrics()...) {
		found[metric.GetName()] = metric
	}
	for _, d := range Descriptors() {
		metric := found[d.GetName()]
		delete(found, d.GetName())
		switch {
		case metric == nil && !optional(d.GetName()):
			t.Errorf("%s is described and not measured", d.GetName())
		case metric != nil && len(metric.GetLabelValues()) != len(d.GetLabelKeys()):
			t.Errorf("%s has the labels %v with the values %v", d.GetName(), d.GetLabelKeys(), metric.GetLabelValues())
		}
	}
	for name := range found {
		t.Errorf("%s is measured and not described", name)
	}
}

// cri: Metric.name Metric.value
func TestMetricsAreTheKernels(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	h := m.hierarchies
	path := makeCgroup(t, h, "values")
	start(t, h, path, "hold "+filepath.Join(t.TempDir(), "file"))
	values := metricsOf(t, m, path)
	directory, cache, most := h.dir("memory", path), "total_cache", "memory.max_usage_in_bytes"
	if h.unified != "" {
		cache, most = "file", "memory.peak"
	}
	const slack = 4 << 20
	between(t, "cache", kernel(t, directory, "memory.stat", cache)-slack, values["container_memory_cache"], kernel(t, directory, "memory.stat", cache)+slack)
	between(t, "the most memory", heldBytes+fileBytes, values["container_memory_max_usage_bytes"], kernel(t, directory, most, ""))
	between(t, "processes", 1, values["container_processes"], 1)
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", kernel(t, h.dir("pids", path), "cgroup.procs", "")))
	must(t, err)
	between(t, "open files", uint64(len(files)), values["container_file_descriptors"], uint64(len(files)))
}

// A limit that is no multiple of a page is rounded by the kernel, and reported as rounded.
func TestTheMemoryLimitIsTheKernels(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	h := m.hierarchies
	path := makeCgroup(t, h, "pages")
	directory, file := h.dir("memory", path), "memory.limit_in_bytes"
	if h.unified != "" {
		file = "memory.max"
	}
	const asked = 80_000_000
	must(t, os.WriteFile(filepath.Join(directory, file), []byte(strconv.Itoa(asked)), 0))
	to := &metrics{}
	to.addSpec(Container{ID: "pages", Cgroup: path, Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: asked}})
	for _, metric := range to.list {
		if metric.GetName() == "container_spec_memory_limit_bytes" {
			limit := kernel(t, directory, file, "")
			between(t, "the limit", limit, metric.GetValue().GetValue(), limit)
			return
		}
	}
	t.Error("there is no limit")
}

// metricsOf are the metrics of a container by name, of which each has one row.
func metricsOf(t *testing.T, m *Meter, path string) map[string]uint64 {
	t.Helper()
	to := &metrics{}
	must(t, m.containerMetrics(Container{ID: "large", Cgroup: path}, to))
	values := make(map[string]uint64)
	for _, metric := range to.list {
		values[metric.GetName()] = metric.GetValue().GetValue()
	}
	return values
}
