package stats

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/opencontainers/cgroups"

	"github.com/minicri/minicri/test/harness"
)

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
