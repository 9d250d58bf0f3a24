package stats

import (
	"os"
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
