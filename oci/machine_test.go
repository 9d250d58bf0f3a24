package oci

import (
	"fmt"
	"os/exec"
	"testing"
)

// The value that pause gets on this machine has to be one that the kernel
// takes: a real process tries it.
func TestMachineKnowsWhatTheKernelAllows(t *testing.T) {
	machine, err := ReadMachine()
	if err != nil {
		t.Fatal(err)
	}
	near := machine.OOMScoreAdjNear(pauseOOMScoreAdj)
	script := fmt.Sprintf("printf %%d %d > /proc/self/oom_score_adj && cat /proc/self/oom_score_adj", near)
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	if err != nil || string(out) != fmt.Sprintln(near) {
		t.Errorf("oom_score_adj %d, chosen by %+v: %v: %s", near, machine, err, out)
	}
	if !machine.CanLowerOOMAdj && near != max(pauseOOMScoreAdj, machine.OOMScoreAdj) {
		t.Errorf("%+v: %d is not the nearest value", machine, near)
	}
}
