package stats

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/cgroups"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cpuNow is what the kernel's file says, in nanoseconds.
func cpuNow(t *testing.T, h hierarchies, path string) uint64 {
	t.Helper()
	if h.unified == "" {
		return kernel(t, h.dir("cpuacct", path), "cpuacct.usage", "")
	}
	return kernel(t, h.dir("cpuacct", path), "cpu.stat", "usage_usec") * 1000
}

// cri: CpuUsage.usage_core_nano_seconds CpuUsage.usage_nano_cores MemoryUsage.timestamp
func TestCPU(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	path := makeCgroup(t, m.hierarchies, "cpu")
	start(t, m.hierarchies, path, "burn")
	began, before := time.Now(), cpuNow(t, m.hierarchies, path)
	first := measure(t, m, path).GetCpu()
	afterFirst, firstDone := cpuNow(t, m.hierarchies, path), time.Now()
	between(t, "cpu time", before, first.GetUsageCoreNanoSeconds().GetValue(), afterFirst)
	if first.GetUsageNanoCores() != nil {
		t.Errorf("there is a rate of %v after one sample", first.GetUsageNanoCores())
	}

	time.Sleep(shortestWindow + 200*time.Millisecond)
	low, shortest := cpuNow(t, m.hierarchies, path), time.Since(firstDone)
	second := measure(t, m, path).GetCpu()
	high, longest := cpuNow(t, m.hierarchies, path), time.Since(began)
	between(t, "cpu time", low, second.GetUsageCoreNanoSeconds().GetValue(), high)
	// The samples were taken within these bounds, however busy the machine is.
	least, most := float64(low-afterFirst)/longest.Seconds(), float64(high-before)/shortest.Seconds()
	if got := float64(second.GetUsageNanoCores().GetValue()); got < 0.99*least || got > 1.01*most || low == afterFirst {
		t.Errorf("usage_nano_cores is %.0f; the kernel's file grew by %.0f to %.0f a second", got, least, most)
	}
	if time.Since(firstDone) > shortest+shortestWindow {
		return // the machine is so busy that the next sample begins a window
	}
	if again := measure(t, m, path).GetCpu().GetUsageNanoCores().GetValue(); again != second.GetUsageNanoCores().GetValue() {
		t.Errorf("who asks at once after another gets the rate %d, and not that of the last window %d", again, second.GetUsageNanoCores().GetValue())
	}
}

func measure(t *testing.T, m *Meter, path string) *runtimeapi.ContainerStats {
	t.Helper()
	measured, err := m.Container(t.Context(), Container{ID: filepath.Base(path), Cgroup: path})
	must(t, err)
	for what, timestamp := range map[string]int64{"cpu": measured.GetCpu().GetTimestamp(), "memory": measured.GetMemory().GetTimestamp()} {
		if time.Since(time.Unix(0, timestamp)) > time.Minute {
			t.Errorf("the timestamp of %s is %d", what, timestamp)
		}
	}
	return measured
}

// cri: MemoryUsage.available_bytes MemoryUsage.page_faults MemoryUsage.rss_bytes MemoryUsage.usage_bytes
// cri: MemoryUsage.working_set_bytes
func TestMemory(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	h := m.hierarchies
	path := makeCgroup(t, h, "memory")
	directory, limitFile, usageFile, prefix, anon := h.dir("memory", path), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "rss"
	if h.unified != "" {
		limitFile, usageFile, prefix, anon = "memory.max", "memory.current", "", "anon"
	}
	if got := measure(t, m, path).GetMemory().GetAvailableBytes(); got != nil {
		t.Errorf("%v bytes are available below no limit", got)
	}
	const limit = 256 << 20
	must(t, os.WriteFile(filepath.Join(directory, limitFile), []byte("268435456"), 0))
	start(t, h, path, "hold "+filepath.Join(t.TempDir(), "file"))

	row := func(key string) uint64 { return kernel(t, directory, "memory.stat", prefix+key) }
	const slack = 4 << 20 // the task's Go runtime keeps running, and the kernel counts in batches
	got := measure(t, m, path).GetMemory()
	usage := kernel(t, directory, usageFile, "")
	between(t, "usage", usage-slack, got.GetUsageBytes().GetValue(), usage+slack)
	between(t, "working set", usage-row("inactive_file")-slack, got.GetWorkingSetBytes().GetValue(), usage-row("inactive_file")+slack)
	between(t, "rss", row(anon)-slack, got.GetRssBytes().GetValue(), row(anon)+slack)
	between(t, "page faults", row("pgfault")/2, got.GetPageFaults().GetValue(), row("pgfault"))
	// The race detector holds several bytes for each.
	between(t, "rss", heldBytes, got.GetRssBytes().GetValue(), 4*heldBytes)
	between(t, "what the working set leaves out", fileBytes-slack, got.GetUsageBytes().GetValue()-got.GetWorkingSetBytes().GetValue(), fileBytes+16<<20)
	if sum := got.GetAvailableBytes().GetValue() + got.GetWorkingSetBytes().GetValue(); sum != limit {
		t.Errorf("available and working set are together %d, not the limit %d", sum, limit)
	}
}

// cri: LinuxPodSandboxStats.containers LinuxPodSandboxStats.memory
func TestPod(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	one, two := makeCgroup(t, m.hierarchies, "one"), makeCgroup(t, m.hierarchies, "two")
	start(t, m.hierarchies, one, "sit")
	start(t, m.hierarchies, two, "sit")
	pod, err := m.Pod(t.Context(), Pod{ID: "pod", Cgroups: []string{one, two}, Containers: []Container{{ID: "one", Cgroup: one}}})
	must(t, err)
	single := kernel(t, m.hierarchies.dir("pids", one), "pids.current", "")
	between(t, "processes of two cgroups", single+1, pod.GetLinux().GetProcess().GetProcessCount().GetValue(), 3*single)
	if n := len(pod.GetLinux().GetContainers()); n != 1 {
		t.Errorf("the pod has %d containers", n)
	}
	container := pod.GetLinux().GetContainers()[0]
	if whole, part := pod.GetLinux().GetMemory().GetUsageBytes().GetValue(), container.GetMemory().GetUsageBytes().GetValue(); whole <= part {
		t.Errorf("the pod uses %d bytes and a part of it %d", whole, part)
	}
}

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
	"cpu.pressure":        "some avg10=1.50 avg60=0.25 avg300=0.05 total=7654321\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=12\n",
}

// cri: PsiData.Avg10 PsiData.Avg300 PsiData.Total PsiStats.Full PsiStats.Some
func TestVersion2Files(t *testing.T) {
	hierarchy := t.TempDir()
	for _, name := range slices.Collect(maps.Keys(version2Files)) {
		must(t, os.WriteFile(filepath.Join(hierarchy, name), []byte(version2Files[name]), 0o600))
	}
	cgroups.TestMode = true
	defer func() { cgroups.TestMode = false }()
	got, err := (&Meter{hierarchies: hierarchies{unified: hierarchy}}).readUsage("", forStats, "/")
	must(t, err)
	if got.CpuStats.CpuUsage.TotalUsage != 1234567000 {
		t.Errorf("cpu time is %v", got.CpuStats.CpuUsage.TotalUsage)
	}
	if m := got.memory; m.usage != 200<<20 || m.limit != 256<<20 || m.workingSet() != 130<<20 || m.anon != 100<<20 || m.activeFile != 20<<20 || m.inactiveFile != 70<<20 || m.faults != 51200 || m.major != 7 {
		t.Errorf("memory is %+v", *m)
	}
	if got.swap.usage != 4<<20 || got.swap.limit < unlimited || got.PidsStats.Current != 3 {
		t.Errorf("swap is %+v, processes are %+v", *got.swap, got.PidsStats)
	}
	if p := psi(got.CpuStats.PSI); p.GetSome().GetAvg10() != 1.5 || p.GetSome().GetTotal() != 7654321000 || p.GetFull().GetTotal() != 12000 || p.GetSome().GetAvg300() != 0.05 {
		t.Errorf("pressure is %v", p)
	}
}
