package machine

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/cgroups"
)

// What the kernel says of the mounted controllers is what we say.
func TestReadControllers(t *testing.T) {
	machine, err := Read(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, controller := range []string{"memory", "cpu", "pids"} {
		if want := isMounted(t, controller); slices.Contains(machine.Controllers, controller) != want {
			t.Errorf("%s: want %v, controllers %q", controller, want, machine.Controllers)
		}
	}
	if slices.Contains(machine.Controllers, "systemd") || slices.Contains(machine.Controllers, "") {
		t.Errorf("a hierarchy without a controller is among %q", machine.Controllers)
	}
}

func isMounted(t *testing.T, controller string) bool {
	t.Helper()
	if cgroups.IsCgroup2UnifiedMode() {
		text, err := os.ReadFile(unifiedRoot + "/cgroup.controllers")
		if err != nil {
			t.Fatal(err)
		}
		return slices.Contains(strings.Fields(string(text)), controller)
	}
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	_, mounted := own[controller]
	return mounted
}

// The capabilities are those of this process, as the kernel shows them.
func TestMachineCapabilities(t *testing.T) {
	machine, err := Read(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.IsSorted(machine.Capabilities) {
		t.Errorf("%q is not sorted", machine.Capabilities)
	}
	for _, name := range machine.Capabilities {
		if !capabilityKnown(name) {
			t.Errorf("%q is no capability", name)
		}
	}
	if slices.Contains(machine.Capabilities, "CAP_SYS_RESOURCE") != machine.CanLowerOOMAdj {
		t.Errorf("%q, but CanLowerOOMAdj is %v", machine.Capabilities, machine.CanLowerOOMAdj)
	}
}

func capabilityKnown(name string) bool {
	return slices.ContainsFunc(capability.ListKnown(), func(c capability.Cap) bool { return "CAP_"+strings.ToUpper(c.String()) == name })
}
