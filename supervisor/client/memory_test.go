package client_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestMemoryPerPod bounds what the supervisor of a pod with one container costs,
// with twenty that share the program's pages. The bound is above what is reached (3.7
// MiB). The program is built without the race detector, whose memory is not the
// supervisor's.
func TestMemoryPerPod(t *testing.T) {
	const pods, limit = 20, 4 << 20
	program := withoutRace(t)
	all := make([]*pod, pods)
	for i := range all {
		all[i] = startPodOf(t, program)
		all[i].run(fmt.Sprint("m", i), "sleep 1000")
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		total := 0
		for _, p := range all {
			total += p.pss()
		}
		if total/pods <= limit {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("PSS per supervisor is %d KiB, want at most %d", total/pods>>10, limit>>10)
		}
	}
}

func withoutRace(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "minicri-shim")
	command := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-tags", "seccomp,runc_nocriu", "-o", program, "../../cmd/minicri-shim")
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

func (p *pod) pss() int {
	p.t.Helper()
	out, err := exec.Command("fuser", filepath.Join(p.dir, "lock")).Output()
	if err != nil {
		p.t.Fatalf("find the shim (needs fuser of psmisc): %v", err)
	}
	rollup, err := os.ReadFile("/proc/" + strings.TrimSpace(string(out)) + "/smaps_rollup")
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(rollup)) {
		if fields := strings.Fields(line); fields[0] == "Pss:" {
			kib, _ := strconv.Atoi(fields[1])
			return kib << 10
		}
	}
	p.t.Fatal("no Pss in smaps_rollup")
	return 0
}
