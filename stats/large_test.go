package stats

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci/pause"
)

// manyProcesses runs as many pauses in a cgroup.
func manyProcesses(t *testing.T, h hierarchies, path string, count int) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "pause")
	content, err := pause.Binary()
	must(t, err)
	must(t, os.WriteFile(program, content, 0o700))
	startShell(t, h, path, fmt.Sprintf(`i=1; while [ $i -lt %d ]; do "$0" & i=$((i+1)); done; echo ready; read end`, count), program)
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

// A container with thousands of processes is measured as any other; its list of
// processes does not fit into a small buffer.
func TestManyProcesses(t *testing.T) {
	const count = 3000
	m := newMeter(t, directories(t.TempDir()))
	path := makeCgroup(t, m.hierarchies, "processes")
	manyProcesses(t, m.hierarchies, path, count)
	values := metricsOf(t, m, path)
	between(t, "processes", count, values["container_processes"], count)
	between(t, "threads", count, values["container_threads"], count)
	if values["container_memory_usage_bytes"] == 0 || values["container_ulimits_soft"] == 0 {
		t.Errorf("the metrics of %d processes are %v", count, values)
	}
	if n, counted := values["container_file_descriptors"]; counted {
		t.Errorf("%d open files are those of a part of the processes", n)
	}
}

// The rows of a pod, whose container is "", have its cpu and memory.
//
// cri: ContainerAttributes.metadata Metric.label_values PodSandboxMetrics.metrics
func TestPodRows(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	path := makeCgroup(t, m.hierarchies, "podrows")
	start(t, m.hierarchies, path, "hold "+filepath.Join(t.TempDir(), "file"))
	answer := m.Metrics(t.Context(), []Pod{{
		ID: "pod", Cgroups: []string{path},
		Attributes: &runtimeapi.PodSandboxAttributes{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default"}},
	}})
	found := make(map[string]uint64)
	for _, metric := range answer[0].GetMetrics() {
		if labels := metric.GetLabelValues(); labels[0] != "" || labels[4] != "default" || labels[5] != "web" {
			t.Errorf("%s has the labels %q", metric.GetName(), labels)
		}
		found[metric.GetName()] = metric.GetValue().GetValue()
	}
	if _, has := found["container_cpu_usage_seconds_total"]; !has || found["container_memory_working_set_bytes"] < heldBytes {
		t.Errorf("the pod's own rows are %v", found)
	}
}
