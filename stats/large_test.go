package stats

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci/pause"
)

// write makes files in the way that the kernel does.
func write(t *testing.T, directory string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(directory, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// manyProcesses runs as many pauses in a cgroup.
func manyProcesses(t *testing.T, h hierarchies, path string, count int) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "pause")
	content, err := pause.Binary()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, content, 0o700); err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	for _, directory := range h.own(path) {
		fmt.Fprintf(&script, "echo $$ > %s/cgroup.procs && ", directory)
	}
	fmt.Fprintf(&script, `i=1; while [ $i -lt %d ]; do "$0" & i=$((i+1)); done; echo ready; read end`, count)
	command := exec.Command("sh", "-c", script.String(), program)
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL)
		_ = stdin.Close()
		_ = command.Wait()
	})
	if _, err := stdout.Read(make([]byte, 5)); err != nil {
		t.Fatalf("%d processes were not started: %v", count, err)
	}
}

// measured are the metrics of a container by name, of which each has one row.
func measured(t *testing.T, m *Meter, path string) map[string]uint64 {
	t.Helper()
	to := &metrics{kinds: kindsOfMetrics()}
	if err := m.containerMetrics(Container{ID: "large", Cgroup: path}, to); err != nil {
		t.Fatal(err)
	}
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
	values := measured(t, m, path)
	between(t, "processes", count, values["container_processes"], count)
	between(t, "threads", count, values["container_threads"], count)
	if values["container_memory_usage_bytes"] == 0 || values["container_ulimits_soft"] == 0 {
		t.Errorf("the metrics of %d processes are %v", count, values)
	}
	if n, counted := values["container_file_descriptors"]; counted {
		t.Errorf("%d open files are those of a part of the processes", n)
	}
}

// version1Files are those of a version 1 container; what they are named after
// differs from version 2, the way they are read does not.
func version1Files() map[string]string {
	var procs, bytes, counts strings.Builder
	for pid := range 20_000 {
		fmt.Fprintln(&procs, 4_000_000+pid)
	}
	for device := range 500 {
		fmt.Fprintf(&bytes, "259:%d Read 4096\n259:%d Write 0\n259:%d Sync 0\n259:%d Async 0\n259:%d Discard 0\n259:%d Total 4096\n", device, device, device, device, device, device)
		fmt.Fprintf(&counts, "259:%d Read 1\n259:%d Write 0\n259:%d Total 1\n", device, device, device)
	}
	return map[string]string{
		"cpuacct.usage": "1000000000\n", "cpuacct.stat": "user 50\nsystem 50\n", "cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
		"memory.usage_in_bytes": "4096\n", "memory.stat": "total_rss 4096\ntotal_cache 0\n", "memory.oom_control": "oom_kill 0\n",
		"memory.max_usage_in_bytes": "4096\n", "memory.failcnt": "0\n", "memory.kmem.usage_in_bytes": "0\n",
		"memory.soft_limit_in_bytes": "9223372036854771712\n", "pids.current": "20000\n", "pids.max": "max\n",
		"cgroup.procs":               procs.String(),
		"hugetlb.2MB.usage_in_bytes": "2097152\n", "hugetlb.2MB.max_usage_in_bytes": "4194304\n", "hugetlb.2MB.rsvd.usage_in_bytes": "0\n",
		"blkio.throttle.io_service_bytes_recursive": bytes.String(), "blkio.throttle.io_serviced_recursive": counts.String(),
	}
}

// fakeHierarchies are all in one directory.
func fakeHierarchies(directory string) hierarchies {
	return hierarchies{cpu: directory, cpuacct: directory, memory: directory, pids: directory, blkio: directory, hugetlb: directory}
}

func TestFilesOfAnyLength(t *testing.T) {
	directory := t.TempDir()
	write(t, directory, version1Files())
	m := newMeter(t, directories(t.TempDir()))
	m.hierarchies = fakeHierarchies(directory)
	to := &metrics{kinds: kindsOfMetrics()}
	if err := m.containerMetrics(Container{ID: "large", Cgroup: "/"}, to); err != nil {
		t.Fatal(err)
	}
	rows, last := make(map[string]int), make(map[string]uint64)
	for _, metric := range to.list {
		rows[metric.GetName()]++
		last[metric.GetName()] = metric.GetValue().GetValue()
	}
	if rows["container_fs_reads_bytes_total"] != 500 || last["container_processes"] != 20_000 {
		t.Errorf("%d devices and %d processes", rows["container_fs_reads_bytes_total"], last["container_processes"])
	}
	if rows["container_hugetlb_usage_bytes"] != 1 || last["container_hugetlb_usage_bytes"] != 2<<20 || last["container_hugetlb_max_usage_bytes"] != 4<<20 {
		t.Errorf("huge pages: %v", last)
	}
	if got, found := last["container_spec_memory_reservation_limit_bytes"]; !found || got != 0 {
		t.Errorf("no reservation is %d", got)
	}
}

// A file that cannot be read or parsed leaves out what is in it; everything else
// is there.
func TestAFileThatFailsLeavesOutItsOwnMetrics(t *testing.T) {
	whole := map[string]int{}
	for name := range version1Files() {
		directory := t.TempDir()
		write(t, directory, version1Files())
		m := newMeter(t, directories(t.TempDir()))
		m.hierarchies = fakeHierarchies(directory)
		if len(whole) == 0 {
			whole = rowsOf(t, m)
		}
		if err := os.Remove(filepath.Join(directory, name)); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(filepath.Join(directory, name), 0o700); err != nil { // reading it is EISDIR
			t.Fatal(err)
		}
		missing := 0
		broken := rowsOf(t, m)
		for metric := range whole {
			if broken[metric] == 0 {
				missing++
			}
		}
		// memory.stat has most, nine; where there is none, or no usage, the two lists of
		// files are missing with the working set.
		if missing > 9 || missing > 7 && name != "memory.stat" {
			t.Errorf("without %s %d of %d metrics are missing: %v", name, missing, len(whole), broken)
		}
	}
}

func rowsOf(t *testing.T, m *Meter) map[string]int {
	t.Helper()
	to := &metrics{kinds: kindsOfMetrics()}
	if err := m.containerMetrics(Container{ID: "one", Cgroup: "/"}, to); err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]int)
	for _, metric := range to.list {
		rows[metric.GetName()]++
	}
	return rows
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
