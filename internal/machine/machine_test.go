package machine

import (
	"fmt"
	"os/exec"
	"testing"
)

// The value that pause gets on this machine has to be one that the kernel
// takes: a real process tries it.
func TestMachineKnowsWhatTheKernelAllows(t *testing.T) {
	machine, err := Read(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
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

func TestOOMScoreAdjNear(t *testing.T) {
	for _, test := range []struct {
		name         string
		machine      Machine
		wanted, near int
	}{
		{"root of a plain machine", Machine{CanLowerOOMAdj: true}, -998, -998},
		{"root of a machine whose daemon is protected", Machine{OOMScoreAdj: -999, CanLowerOOMAdj: true}, -998, -998},
		{"no CAP_SYS_RESOURCE", Machine{OOMScoreAdj: 0}, -998, 0},
		{"no CAP_SYS_RESOURCE, a daemon that is itself high", Machine{OOMScoreAdj: 200}, -998, 200},
		{"no CAP_SYS_RESOURCE, a daemon that was protected by its parent", Machine{OOMScoreAdj: -999}, -998, -998},
		{"a higher value needs no capability", Machine{OOMScoreAdj: 0}, 1000, 1000},
	} {
		if near := test.machine.OOMScoreAdjNear(test.wanted); near != test.near {
			t.Errorf("%s: %d becomes %d, want %d", test.name, test.wanted, near, test.near)
		}
	}
}
