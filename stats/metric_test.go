package stats

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/cgroups"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
)

// directories measures layers as the image store does, by walking a directory.
type directories string

func (d directories) SnapshotUsage(_ context.Context, id string) (image.Usage, error) {
	usage := image.Usage{Mountpoint: string(d), Time: time.Now()}
	err := filepath.WalkDir(filepath.Join(string(d), id), func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			usage.Inodes++
			usage.Bytes += uint64(info.Size())
		}
		return err
	})
	return usage, err
}

func newMeter(t *testing.T, source Layers) *Meter {
	m, err := Open(t.Context(), source, slog.New(slog.NewTextHandler(t.Output(), nil)))
	must(t, err)
	t.Cleanup(m.Close)
	return m
}

// own are the directories of a cgroup, one in each hierarchy.
func (h hierarchies) own(path string) []string {
	var dirs []string
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids", ""} {
		if directory := h.dir(controller, path); controller != "" || h.unified != "" {
			dirs = append(dirs, directory)
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// makeCgroup makes a cgroup in every hierarchy and returns its path.
func makeCgroup(t testing.TB, h hierarchies, name string) string {
	path := fmt.Sprintf("/minicri-stats-%d-%s", time.Now().UnixNano(), name)
	for _, directory := range h.own(path) {
		enableControllers(t, h, filepath.Dir(directory))
		must(t, os.Mkdir(directory, 0o755))
	}
	t.Cleanup(func() {
		all, err := cgroup.FindHierarchies()
		harness.Check(t, errors.Join(err, all.Remove(path, time.Minute)))
	})
	return path
}

// enableControllers does so on version 2, for those that are not on version 1.
func enableControllers(t testing.TB, h hierarchies, directory string) {
	if h.unified == "" || !strings.HasPrefix(directory, h.unified) {
		return
	}
	must(t, os.WriteFile(filepath.Join(directory, "cgroup.subtree_control"), []byte("+cpu +memory +pids"), 0))
}

// start starts a process in the cgroup, in all hierarchies, and ends it after the test.
func start(t *testing.T, h hierarchies, path string) {
	command := exec.Command("sh", "-c", "read go; head -c 1000000 /dev/zero; echo; exec sleep 600") // what it holds then is the cgroup's
	stdin, err := command.StdinPipe()
	must(t, err)
	stdout, err := command.StdoutPipe()
	must(t, errors.Join(err, command.Start()))
	t.Cleanup(func() { _, _ = command.Process.Kill(), command.Wait() })
	for _, directory := range h.own(path) {
		must(t, os.WriteFile(directory+"/cgroup.procs", []byte(strconv.Itoa(command.Process.Pid)), 0))
	}
	_, err = fmt.Fprintln(stdin)
	must(t, err)
	_, err = io.CopyN(io.Discard, stdout, 1000001) // head has ended, which counts as a process
	must(t, err)
}

// kernel reads a number from a cgroup file, by other means than the meter. With a key it is that row of a table.
func kernel(t *testing.T, directory, name, key string) uint64 {
	content := harness.Read(t, filepath.Join(directory, name))
	fields := strings.Fields(string(content))
	if key != "" {
		fields = fields[slices.Index(fields, key)+1:]
	}
	number, err := strconv.ParseUint(fields[0], 10, 64)
	must(t, err)
	return number
}

// between fails unless low <= got <= high.
func between(t *testing.T, what string, low, got, high uint64) {
	harness.Want(t, got >= low && got <= high, "%s: got %d, the kernel says %d to %d", what, got, low, high)
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }

// The files of a version 2 container as Linux 6.18 writes them, on a machine
// where version 1 has the controllers: reading them is the same everywhere.
var version2Files = map[string]string{
	"cpu.stat":            "usage_usec 1234567\nuser_usec 1000000\nsystem_usec 234567\n",
	"memory.current":      "209715200\n",
	"memory.max":          "268435456\n",
	"memory.stat":         "anon 104857600\nfile 94371840\ninactive_anon 104857600\nactive_anon 0\ninactive_file 73400320\nactive_file 20971520\npgfault 51200\npgmajfault 7\n",
	"memory.swap.current": "4194304\n",
	"memory.swap.max":     "max\n",
	"pids.current":        "3\n",
	"pids.max":            "max\n",
	"cpu.pressure":        pressure,
	"memory.pressure":     pressure,
	"io.pressure":         pressure,
}

const pressure = "some avg10=1.50 avg60=0.25 avg300=0.05 total=7654321\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=12\n"

// cri: ContainerStats.io ContainerStats.memory ContainerStats.swap CpuUsage.psi CpuUsage.usage_core_nano_seconds
// cri: CpuUsage.usage_nano_cores IoUsage.psi IoUsage.timestamp MemoryUsage.available_bytes MemoryUsage.major_page_faults
// cri: MemoryUsage.page_faults MemoryUsage.psi MemoryUsage.rss_bytes MemoryUsage.usage_bytes MemoryUsage.working_set_bytes
// cri: PsiData.Avg10 PsiData.Avg300 PsiData.Avg60 PsiData.Total PsiStats.Full PsiStats.Some
// cri: SwapUsage.swap_available_bytes SwapUsage.swap_usage_bytes SwapUsage.timestamp
func TestVersion2Files(t *testing.T) {
	hierarchy := t.TempDir()
	for name, text := range version2Files {
		must(t, os.WriteFile(filepath.Join(hierarchy, name), []byte(text), 0o600))
	}
	cgroups.TestMode = true
	defer func() { cgroups.TestMode = false }()
	m := &Meter{hierarchies: hierarchies{unified: hierarchy}, samples: make(map[string]sample)}
	used, err := m.readUsage("", forStats, "/")
	must(t, err)
	at, psi := used.at.UnixNano(), &runtimeapi.PsiStats{
		Some: &runtimeapi.PsiData{Avg10: 1.5, Avg60: 0.25, Avg300: 0.05, Total: 7654321000}, Full: &runtimeapi.PsiData{Total: 12000},
	}
	harness.Same(t, "cpu", m.cpuUsage("", used), &runtimeapi.CpuUsage{Timestamp: at, Psi: psi, UsageCoreNanoSeconds: value(1234567000)})
	harness.Same(t, "memory", used.memoryUsage(), &runtimeapi.MemoryUsage{
		Timestamp: at, Psi: psi, WorkingSetBytes: value(130 << 20), AvailableBytes: value(126 << 20), UsageBytes: value(200 << 20),
		RssBytes: value(100 << 20), PageFaults: value(51200), MajorPageFaults: value(7),
	})
	harness.Same(t, "swap", used.swapUsage(), &runtimeapi.SwapUsage{Timestamp: at, SwapUsageBytes: value(4 << 20)})
	harness.Same(t, "io", used.ioUsage(), &runtimeapi.IoUsage{Timestamp: at, Psi: psi})
	harness.Same(t, "processes", used.PidsStats.Current, 3)
	harness.Want(t, used.memory.activeFile == 20<<20 && used.memory.inactiveFile == 70<<20, "memory is %+v", *used.memory)
}

// newNamespace is a network namespace with an eth0, which a process of the test holds.
func newNamespace(t *testing.T) (path string) {
	command := exec.Command("unshare", "--net", "sh", "-c", "ip link add eth0 type bridge && ip link set eth0 up && echo && read line")
	stdin, err := command.StdinPipe()
	must(t, err)
	stdout, err := command.StdoutPipe()
	must(t, errors.Join(err, command.Start()))
	t.Cleanup(func() { _, _ = stdin.Close(), command.Wait() })
	_, err = stdout.Read(make([]byte, 1))
	must(t, err)
	return fmt.Sprintf("/proc/%d/ns/net", command.Process.Pid)
}

// cri: LinuxPodSandboxStats.network
func TestNetworkThatIsGone(t *testing.T) {
	plain := t.TempDir() + "/plain"
	must(t, os.WriteFile(plain, nil, 0o600))
	for _, path := range []string{plain, plain + "-missing"} {
		got, err := readNetwork(path)
		harness.Want(t, err != nil, "%s is no namespace and has %v", path, got)
		m := newMeter(t, directories(t.TempDir()))
		cgroup := makeCgroup(t, m.hierarchies, filepath.Base(path))
		pod, err := m.Pod(t.Context(), Pod{ID: "pod", Cgroups: []string{cgroup}, Netns: path})
		harness.Need(t, err == nil && pod.GetLinux().GetCpu() != nil, "a pod without its network is %v (%v)", pod, err)
		harness.Want(t, pod.GetLinux().GetNetwork() == nil, "a pod without its network is %v (%v)", pod, err)
	}
}

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

// The numbers of a container are those of its cgroup at that moment.
//
// cri: ContainerStats.cpu CpuUsage.timestamp MemoryUsage.timestamp
func TestNumbersAreTheKernels(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	path := makeCgroup(t, m.hierarchies, "numbers")
	start(t, m.hierarchies, path)
	files := map[string][2]string{ // of version 1, and of version 2 with the key of a row
		"cpu": {"cpuacct.usage"}, "usage": {"memory.usage_in_bytes"}, "anon": {"memory.stat", "total_rss"}, "faults": {"memory.stat", "total_pgfault"},
	}
	if m.hierarchies.unified != "" {
		files = map[string][2]string{
			"cpu": {"cpu.stat", "usage_usec"}, "usage": {"memory.current"}, "anon": {"memory.stat", "anon"}, "faults": {"memory.stat", "pgfault"},
		}
	}
	look := func() map[string]uint64 {
		now := make(map[string]uint64)
		for name, file := range files {
			controller := map[bool]string{true: "cpuacct", false: "memory"}[name == "cpu"]
			now[name] = kernel(t, m.hierarchies.dir(controller, path), file[0], file[1])
		}
		if m.hierarchies.unified != "" {
			now["cpu"] *= 1000
		}
		return now
	}
	before, began := look(), time.Now().UnixNano()
	s, err := m.Container(t.Context(), Container{ID: "numbers", Cgroup: path})
	must(t, err)
	after := look()
	const slack = 4 << 20 // counts of pages, one for each CPU, are added up late
	between(t, "cpu", before["cpu"], s.GetCpu().GetUsageCoreNanoSeconds().GetValue(), after["cpu"])
	between(t, "usage", before["usage"]-min(slack, before["usage"]), s.GetMemory().GetUsageBytes().GetValue(), after["usage"]+slack)
	between(t, "rss", before["anon"]-min(slack, before["anon"]), s.GetMemory().GetRssBytes().GetValue(), after["anon"]+slack)
	between(t, "page faults", before["faults"]-min(2000, before["faults"]), s.GetMemory().GetPageFaults().GetValue(), after["faults"]+2000)
	for what, at := range harness.Sorted(map[string]int64{"cpu": s.GetCpu().GetTimestamp(), "memory": s.GetMemory().GetTimestamp()}) {
		between(t, "the time of "+what, uint64(began), uint64(at), uint64(time.Now().UnixNano()))
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
	harness.Want(t, got.GetCpu() == nil, "the stats of a container that has ended are %v", got)
	harness.Want(t, got.GetMemory() == nil, "the stats of a container that has ended are %v", got)
	harness.Want(t, got.GetWritableLayer().GetInodesUsed().GetValue() == 1,
		"the stats of a container that has ended are %v", got)
}

// hung is a layer on a disk that does not answer.
type hung struct {
	directories
	entered chan struct{}
	left    *atomic.Bool
}

func (h hung) SnapshotUsage(ctx context.Context, id string) (image.Usage, error) {
	if id != "hung" {
		return h.directories.SnapshotUsage(ctx, id)
	}
	close(h.entered) // twice would panic: one walk at a time
	<-ctx.Done()
	h.left.Store(true)
	return image.Usage{}, ctx.Err()
}

// cri: ContainerStats.cpu ContainerStats.writable_layer
func TestHungLayerHoldsUpNobody(t *testing.T) {
	layers := t.TempDir()
	source := hung{directories(layers), make(chan struct{}), new(atomic.Bool)}
	m := newMeter(t, source)
	path := makeCgroup(t, m.hierarchies, "beside")
	must(t, os.Mkdir(filepath.Join(layers, "beside"), 0o755))
	harness.Eventually(t, "the other layer is measured", func() bool {
		list := m.Containers(t.Context(), []Container{{ID: "hung", Cgroup: path}, {ID: "beside", Cgroup: path}})
		harness.Need(t, len(list) == 2, "the list is %v", list)
		harness.Need(t, list[0].GetWritableLayer() == nil, "the list is %v", list)
		harness.Need(t, list[0].GetCpu() != nil, "the list is %v", list)
		return list[1].GetWritableLayer() != nil
	})
	harness.Same(t, "files in the sum of the layers", m.Layers(t.Context(), []string{"beside", "hung"}).Inodes, 1)
	<-source.entered
	harness.Want(t, !source.left.Load(), "the layer does not hang any more: the others may have waited for it")
}

func TestRateOfACgroupMadeAgain(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	at := time.Now()
	m.rate("again", at, time.Hour)
	harness.Same(t, "the rate over two lives of a cgroup", m.rate("again", at.Add(time.Minute), time.Second), nil)
	harness.Same(t, "30 s of cpu time in a minute", m.rate("again", at.Add(2*time.Minute), 31*time.Second).GetValue(), 5e8)
}
