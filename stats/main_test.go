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
	"testing"
	"time"

	"github.com/opencontainers/cgroups"

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
	"cpu.pressure":        "some avg10=1.50 avg60=0.25 avg300=0.05 total=7654321\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=12\n",
}

// cri: PsiData.Avg10 PsiData.Avg300 PsiData.Total PsiStats.Full PsiStats.Some
func TestVersion2Files(t *testing.T) {
	hierarchy := t.TempDir()
	for name, text := range version2Files {
		must(t, os.WriteFile(filepath.Join(hierarchy, name), []byte(text), 0o600))
	}
	cgroups.TestMode = true
	defer func() { cgroups.TestMode = false }()
	got, err := (&Meter{hierarchies: hierarchies{unified: hierarchy}}).readUsage("", forStats, "/")
	must(t, err)
	harness.Want(t, got.CpuStats.CpuUsage.TotalUsage == 1234567000, "cpu time is %v", got.CpuStats.CpuUsage.TotalUsage)
	if m := got.memory; m.usage != 200<<20 || m.limit != 256<<20 || m.workingSet() != 130<<20 || m.anon != 100<<20 || m.activeFile != 20<<20 || m.inactiveFile != 70<<20 || m.faults != 51200 || m.major != 7 {
		t.Errorf("memory is %+v", *m)
	}
	harness.Want(t, got.swap.usage == 4<<20 && got.swap.limit >= unlimited && got.PidsStats.Current == 3,
		"swap is %+v, processes are %+v", *got.swap, got.PidsStats)
	if p := psi(got.CpuStats.PSI); p.GetSome().GetAvg10() != 1.5 || p.GetSome().GetTotal() != 7654321000 || p.GetFull().GetTotal() != 12000 || p.GetSome().GetAvg300() != 0.05 {
		t.Errorf("pressure is %v", p)
	}
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
		harness.Want(t, err == nil && pod.GetLinux().GetCpu() != nil && pod.GetLinux().GetNetwork() == nil, "a pod without its network is %v (%v)", pod, err)
	}
}
