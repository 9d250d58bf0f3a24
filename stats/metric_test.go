package stats

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/test/harness"
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
	for _, directory := range m.hierarchies.own(path) {
		must(t, os.Mkdir(directory+"/inner", 0o755)) // as an exec has
	}
	start(t, m.hierarchies, path)
	start(t, m.hierarchies, path+"/inner")
	answer := m.Metrics(t.Context(), []Pod{{
		ID: "pod", Cgroups: []string{path}, Netns: newNamespace(t), Attributes: &runtimeapi.PodSandboxAttributes{},
		Containers: []Container{
			{ID: "vanished", Cgroup: path + "/vanished"},
			{ID: "metrics", Cgroup: path, StartedAt: time.Now().UnixNano(), Resources: &runtimeapi.LinuxContainerResources{CpuQuota: 20000}},
		},
	}})
	harness.Need(t, len(answer) == 1 && len(answer[0].GetContainerMetrics()) == 1, "the metrics are %v", answer)
	found := make(map[string]*runtimeapi.Metric)
	for _, metric := range append(answer[0].GetMetrics(), answer[0].GetContainerMetrics()[0].GetMetrics()...) {
		found[metric.GetName()] = metric
	}
	harness.Same(t, "processes", found["container_processes"].GetValue().GetValue(), 2)
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

// A container that has a million files open, as dup(2) makes them, is counted no further than to the bound.
func TestFilesAreCountedUpToABound(t *testing.T) {
	all, _ := openFiles("self", 1<<16)
	some, _ := openFiles("self", 2)
	harness.Want(t, all > 3 && some == 3, "%d files, %d up to 2", all, some)
}

func TestListLeavesOutWhatCannotBeMeasured(t *testing.T) {
	layers := t.TempDir()
	m := newMeter(t, directories(layers))
	path := makeCgroup(t, m.hierarchies, "listed")
	must(t, os.MkdirAll(filepath.Join(layers, "listed", "sub"), 0o755))
	must(t, os.WriteFile(filepath.Join(layers, "listed", "sub", "file"), make([]byte, 1<<20), 0o600))
	list := m.Containers(t.Context(), []Container{
		{ID: "vanished", Cgroup: path + "/vanished"},
		{ID: "broken", Cgroup: path + "/cgroup.procs/not-a-directory"},
		{ID: "listed", Cgroup: path},
	})
	harness.Want(t, len(list) == 1, "%d are listed, not the one that there is: %v", len(list), list)
	// Alone it is waited for longer than in a list.
	listed, err := m.Container(t.Context(), Container{ID: "listed", Cgroup: path})
	must(t, err)
	layer := listed.GetWritableLayer()
	between(t, "bytes of the layer", 1<<20, layer.GetUsedBytes().GetValue(), 1<<20+64<<10)
	between(t, "inodes of the layer", 3, layer.GetInodesUsed().GetValue(), 3)
	harness.Want(t, layer.GetTimestamp() > 0 && layer.GetFsId().GetMountpoint() == layers, "the layer is %v", layer)
}

// cri: ContainerStats.memory
func TestContainerThatDoesNotRunHasItsLayer(t *testing.T) {
	layers := t.TempDir()
	m := newMeter(t, directories(layers))
	must(t, os.Mkdir(filepath.Join(layers, "ended"), 0o755))
	got, err := m.Container(t.Context(), Container{ID: "ended", Cgroup: "/minicri-stats-no-such-cgroup"})
	must(t, err)
	harness.Want(t, got.GetCpu() == nil && got.GetMemory() == nil && got.GetWritableLayer().GetInodesUsed().GetValue() == 1,
		"the stats of a container that has ended are %v", got)
}

// hung is a layer on a disk that does not answer.
type hung struct {
	directories
	entered chan struct{}
}

func (h hung) SnapshotUsage(ctx context.Context, id string) (image.Usage, error) {
	if id != "hung" {
		return h.directories.SnapshotUsage(ctx, id)
	}
	close(h.entered) // twice would panic: one walk at a time
	<-ctx.Done()
	return image.Usage{}, ctx.Err()
}

// cri: ContainerStats.cpu ContainerStats.writable_layer
func TestHungLayerHoldsUpNobody(t *testing.T) {
	layers := t.TempDir()
	source := hung{directories(layers), make(chan struct{})}
	m := newMeter(t, source)
	path := makeCgroup(t, m.hierarchies, "beside")
	must(t, os.Mkdir(filepath.Join(layers, "beside"), 0o755))
	// The least of them: the machine may be busy.
	const most = layerWait + 50*time.Millisecond
	fastest, measured := time.Hour, false
	for began := time.Now(); (!measured || fastest > most) && time.Since(began) < time.Minute; {
		began := time.Now()
		list := m.Containers(t.Context(), []Container{{ID: "hung", Cgroup: path}, {ID: "beside", Cgroup: path}})
		fastest = min(fastest, time.Since(began))
		harness.Need(t, len(list) == 2 && list[0].GetWritableLayer() == nil && list[0].GetCpu() != nil, "the list is %v", list)
		measured = list[1].GetWritableLayer() != nil
	}
	began := time.Now()
	sum := m.Layers(t.Context(), []string{"beside", "hung"})
	harness.Want(t, sum.Inodes == 1 && time.Since(began) < 30*time.Second, "the sum of the layers is %+v after %v", sum, time.Since(began))
	harness.Want(t, measured && fastest <= most,
		"the fastest list took %v beside a layer that hangs; the other layer is measured: %v", fastest, measured)
	<-source.entered
}

func TestRateOfACgroupMadeAgain(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	at := time.Now()
	m.rate("again", at, time.Hour)
	harness.Same(t, "the rate over two lives of a cgroup", m.rate("again", at.Add(time.Minute), time.Second), nil)
	harness.Same(t, "30 s of cpu time in a minute", m.rate("again", at.Add(2*time.Minute), 31*time.Second).GetValue(), 5e8)
}
