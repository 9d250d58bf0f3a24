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

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/shim/api"
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
	// Some seconds later they give back what starting took; it takes some to do so.
	time.Sleep(10 * time.Second)
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

// awaitEnd waits until a log ends so.
func (p *pod) awaitEnd(id, words string) {
	p.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if end, _ := exec.Command("tail", "-c", strconv.Itoa(len(words)), p.logPath(id)).Output(); string(end) == words {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("the log of %s does not end with %q", id, words)
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

// The supervisor of the node, which has several processors, gives back what a flood of
// short lines took.
func TestMemoryAfterAFlood(t *testing.T) {
	dir, err := os.MkdirTemp("", "flood") // short: a socket's path is bounded
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &pod{t: t, dir: filepath.Join(dir, api.NodeGroup), binary: withoutRace(t)}
	if err := os.Mkdir(p.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p.start()
	t.Cleanup(p.end)
	const floods = 4
	for i := range floods {
		p.run(fmt.Sprint("c", i), "read line; head -c 4194304 /dev/zero | tr '\\0' '\\n'; echo end; exec sleep 1000000", func(_ *specs.Spec, r *api.CreateRequest) { r.Stdin = true })
	}
	time.Sleep(6 * time.Second) // it gives back what starting took
	before := p.pss()
	for i := range floods {
		fmt.Fprint(p.stream(fmt.Sprint("c", i), "", api.Stdin), "go\n")
	}
	for i := range floods {
		p.awaitEnd(fmt.Sprint("c", i), " end\n")
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if now := p.pss(); now <= before*13/10 {
			t.Logf("PSS is %d KiB, before it was %d", now>>10, before>>10)
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("PSS is %d KiB a minute after the flood, before it was %d", p.pss()>>10, before>>10)
		}
	}
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
