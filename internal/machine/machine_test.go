package machine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/cgroups"

	"github.com/minicri/minicri/test/harness"
)

// The value that pause gets on this machine has to be one that the kernel
// takes: a real process tries it.
func TestMachineKnowsWhatTheKernelAllows(t *testing.T) {
	machine, err := Read(t.TempDir())
	harness.Check(t, err)
	near := machine.OOMScoreAdjNear(-998)
	script := fmt.Sprintf("printf %%d %d > /proc/self/oom_score_adj && cat /proc/self/oom_score_adj", near)
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	if err != nil || string(out) != fmt.Sprintln(near) {
		t.Errorf("oom_score_adj %d, chosen by %+v: %v: %s", near, machine, err, out)
	}
	if !machine.CanLowerOOMAdj && near != max(-998, machine.OOMScoreAdj) {
		t.Errorf("%+v: %d is not the nearest value", machine, near)
	}
}

func TestCount(t *testing.T) {
	for text, want := range map[string]uint64{"0\n": 1, "0-1\n": 2, "0-3,8-127\n": 128, "": 0, "all": 0} {
		file := filepath.Join(t.TempDir(), "possible")
		harness.Check(t, os.WriteFile(file, []byte(text), 0o600))
		if got := count(file); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
	if got := count("/no/such/file"); got != 0 {
		t.Errorf("without the file: %d", got)
	}
	if got := memoryNodes("/no/such/file"); got != 1 {
		t.Errorf("a kernel without NUMA has %d memory nodes, want 1", got)
	}
	if m, err := Read(t.TempDir()); err != nil || m.CPUs < uint64(runtime.NumCPU()) || m.MemoryNodes == 0 {
		t.Errorf("this machine has %d CPUs and %d memory nodes: %v", m.CPUs, m.MemoryNodes, err)
	}
}

// What the kernel says of the mounted controllers is what we say.
func TestReadControllers(t *testing.T) {
	machine, err := Read(t.TempDir())
	harness.Check(t, err)
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	harness.Check(t, err)
	unified, _ := os.ReadFile(unifiedRoot + "/cgroup.controllers")
	for _, controller := range []string{"memory", "cpu", "pids"} {
		_, want := own[controller]
		if machine.CgroupV2 {
			want = slices.Contains(strings.Fields(string(unified)), controller)
		}
		if slices.Contains(machine.Controllers, controller) != want {
			t.Errorf("%s: want %v, controllers %q", controller, want, machine.Controllers)
		}
	}
	if slices.Contains(machine.Controllers, "systemd") || slices.Contains(machine.Controllers, "") {
		t.Errorf("a hierarchy without a controller is among %q", machine.Controllers)
	}
}

// The capabilities are those of this process, as the kernel shows them.
func TestMachineCapabilities(t *testing.T) {
	machine, err := Read(t.TempDir())
	harness.Check(t, err)
	for _, name := range machine.Capabilities {
		if !slices.ContainsFunc(capability.ListKnown(), func(c capability.Cap) bool { return "CAP_"+strings.ToUpper(c.String()) == name }) {
			t.Errorf("%q is no capability", name)
		}
	}
	if !slices.IsSorted(machine.Capabilities) || slices.Contains(machine.Capabilities, "CAP_SYS_RESOURCE") != machine.CanLowerOOMAdj {
		t.Errorf("%q, but CanLowerOOMAdj is %v", machine.Capabilities, machine.CanLowerOOMAdj)
	}
	// A higher value needs no capability.
	for wanted, near := range map[int]int{-998: 200, 1000: 1000} {
		if got := (Machine{OOMScoreAdj: 200}).OOMScoreAdjNear(wanted); got != near {
			t.Errorf("without CAP_SYS_RESOURCE %d becomes %d", wanted, got)
		}
	}
}

// Directories that the node needs are never relabelled, whatever their spelling,
// and what is below them may be.
func TestCheckRelabel(t *testing.T) {
	for _, path := range []string{"/", "//", "/etc", "/etc/", "/usr", "/usr/.", "/var/../etc", "/var/lib"} {
		if CheckRelabel(path) == nil {
			t.Errorf("%s may be relabelled", path)
		}
		if (Machine{SELinux: true}).Relabel(path, "system_u:object_r:container_file_t:s0", false) == nil {
			t.Errorf("%s has been relabelled", path)
		}
	}
	for _, path := range []string{"/etc/app", "/var/lib/kubelet/pods/1/volumes/x", "/data"} {
		if err := CheckRelabel(path); err != nil {
			t.Error(err)
		}
	}
}
