package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// whole reports whether a long test runs as a whole, which make test-supervisor
// asks for.
func whole() bool { return os.Getenv("MINICRI_TEST_WHOLE") != "" }

// anotherShim is the node's shim with a byte more: another build of it.
func anotherShim(t *testing.T, n *harness.Node, mark byte) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(n.Binaries(), "minicri-shim"))
	check(t, err)
	path := filepath.Join(t.TempDir(), "minicri-shim")
	check(t, os.WriteFile(path, append(content, mark), 0o755))
	return path
}

// runs are the containers of a pod that an upgrade or a death must not disturb.
type runs struct {
	*pod
	lives, writes, waits, dies string
	pid                        int
}

const lines = 4000

func startRuns(t *testing.T, n *harness.Node, i int) runs {
	t.Helper()
	r := runs{pod: runPod(t, n, fmt.Sprint("pod-", i))}
	r.lives = r.run("lives", forever)
	r.writes = r.run("writes", fmt.Sprintf("i=0; while [ $i -lt %d ]; do printf 'line '; echo $i; i=$((i+1)); done; exec sleep 1000000", lines))
	r.waits = r.create(shell("waits", fmt.Sprintf("exit %d", 50+i%50)))
	r.dies = r.run("dies", fmt.Sprintf("sleep 2; exit %d", 100+i%50))
	r.pid = r.info(r.lives).PID
	return r
}

// wantUndisturbed looks at the containers after the supervisor was upgraded, or
// replaced.
func (r runs) wantUndisturbed(t *testing.T, i int) {
	t.Helper()
	eventually(t, "the state is known", func() bool { return r.status(r.lives).State == running })
	if now := r.info(r.lives).PID; now != r.pid {
		t.Errorf("pod %d: pid %d, it was %d", i, now, r.pid)
	}
	r.wantExit(r.dies, int32(100+i%50), "Error")
	check(t, r.start(r.waits))
	r.wantExit(r.waits, int32(50+i%50), "Error")
	same(t, "exec", r.exec(r.lives, "echo hi"), "hi")
	want := strings.Builder{}
	for i := range lines {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	eventually(t, "all lines are in the log", func() bool {
		stdout, _ := r.logs(r.writes)
		return len(stdout) >= want.Len()
	})
	if stdout, _ := r.logs(r.writes); stdout != want.String() {
		t.Errorf("pod %d: the log is not what was written: %d bytes, want %d", i, len(stdout), want.Len())
	}
}

// A daemon with another build of the shim upgrades the supervisor under its pods;
// one whose shim cannot take over says so and continues with the old one; the way
// back is the same.
func TestUpgrade(t *testing.T) {
	count := 4
	if whole() {
		count = 30
	}
	n := newNode(t)
	var all []runs
	for i := range count {
		all = append(all, startRuns(t, n, i))
	}
	supervisors := fmt.Sprint(shims(n))
	n.Stop()
	n.SetFlags("--shim", anotherShim(t, n, 1))
	n.Start()
	for i, r := range all {
		r.wantUndisturbed(t, i)
	}
	for line := range strings.Lines(n.Log()) {
		if strings.Contains(line, "the supervisor was upgraded") {
			t.Log(line)
		}
	}
	wantUpgrades(t, n, len(shims(n)), 0)

	n.Kill()
	n.SetFlags("--shim", "/bin/false")
	n.Start()
	wantUpgrades(t, n, len(shims(n)), len(shims(n)))
	same(t, "exec by the build before", all[0].exec(all[0].lives, "echo hi"), "hi")

	n.Restart()
	n.SetFlags("--shim", filepath.Join(n.Binaries(), "minicri-shim"))
	n.Restart()
	wantUpgrades(t, n, 2*len(shims(n)), 2*len(shims(n)))
	same(t, "the supervisors", fmt.Sprint(shims(n)), supervisors)
	for _, r := range all {
		if now := r.info(r.lives).PID; now != r.pid || r.status(r.lives).State != running {
			t.Errorf("after all upgrades: pid %d, it was %d", now, r.pid)
		}
		check(t, r.stop(r.lives, 20))
		r.wantExit(r.lives, 10, "Error") // USR1, as the image wants it
	}
}

// wantUpgrades counts what the daemons have said.
func wantUpgrades(t *testing.T, n *harness.Node, done, refused int) {
	t.Helper()
	log := n.Log()
	if now := strings.Count(log, "the supervisor was upgraded"); now != done {
		t.Errorf("%d upgrades, want %d", now, done)
	}
	if now := strings.Count(log, "the supervisor could not be upgraded: the old build continues to serve"); now != refused {
		t.Errorf("%d upgrades were refused, want %d", now, refused)
	}
}

// The same things are true when the supervisor is killed under many pods: who
// comes next serves within a second, and what it cannot know it does not make up.
func TestKilledUnderManyPods(t *testing.T) {
	count := 6
	if whole() {
		count = 100
	}
	n := newNode(t)
	var all []runs
	for i := range count {
		all = append(all, startRuns(t, n, i))
	}
	serves := killAndAwait(t, n, all[0])
	t.Logf("%d pods: a successor serves %v after the kill", count, serves)
	for i, r := range all {
		r.wantUndisturbed(t, i)
	}
	for _, r := range all {
		_, err := n.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: r.id})
		check(t, err)
	}
}

// A daemon that is killed while pods are being run and commands run in containers
// is followed by one with another build of the supervisor: what was being made is
// made or undone, and commands that have no caller any more are ended.
func TestUpgradeBesideRunsAndExecs(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	pid := shims(p.Node)[0]
	const times = 3
	for i := range times {
		var calls sync.WaitGroup
		for j := range 4 {
			config := p.PodConfig(fmt.Sprintf("cut-%d-%d", i, j))
			calls.Go(func() {
				_, _ = p.Runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config}) // its daemon is killed
			})
		}
		calls.Go(func() {
			_, _ = p.Runtime.ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"sleep", "7777"}})
		})
		time.Sleep(time.Duration(20+40*i) * time.Millisecond)
		p.Kill()
		calls.Wait()
		p.SetFlags("--shim", anotherShim(t, p.Node, byte(10+i)))
		p.Start()
		if harness.OneSupervisor() {
			wantUpgrades(t, p.Node, i+1, 0)
		}
		for _, line := range p.commandsOf(id) {
			if strings.Contains(line, "7777") {
				t.Errorf("a command without a caller still runs: %q", line)
			}
		}
		same(t, "exec", p.exec(id, "echo hi"), "hi")
	}
	if now := shims(p.Node); harness.OneSupervisor() && (len(now) != 1 || now[0] != pid) {
		t.Errorf("supervisors %v, want process %d", now, pid)
	}
	list, err := p.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
	check(t, err)
	for _, pod := range list.Items {
		if pod.Id != p.id {
			p.RemovePod(pod.Id)
		}
	}
}

// commandsOf are the command lines of a container's processes, execs included.
func (p *pod) commandsOf(id string) (lines []string) {
	p.t.Helper()
	group := p.info(id).CgroupsPath
	pids := append(p.pidsInCgroup(group), p.pidsInCgroup(group+"/*")...)
	for _, pid := range pids {
		line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		lines = append(lines, string(line))
	}
	return lines
}
