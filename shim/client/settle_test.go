package client_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/api"
)

// The end of a container is seen while the successor still ends commands in others that
// cannot be ended: they sleep uninterruptibly.
func TestExitsBesideExecsThatCannotBeEnded(t *testing.T) {
	p := startPod(t)
	disk, thaw := frozenDisk(t)
	hang := []string{"hangs0", "hangs1"} // each for as many times the limit of one command
	for _, id := range hang {
		p.run(id, "sleep 1000", disk)
		p.hangs(id, 10)
	}
	ending := make(map[string]int32)
	for i := range 10 {
		id := fmt.Sprint("ends", i)
		ending[id] = p.run(id, "while :; do sleep 1; done").Pid // a shell, which reapOrphans reaps
	}
	p.killShim()
	reapOrphans()
	p.restart()
	for _, pid := range ending {
		if err := unix.Kill(int(pid), unix.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	for id := range ending {
		p.awaitExit(t.Context(), id)
	}
	for _, id := range hang {
		if len(p.execNotes(id)) == 0 {
			t.Errorf("ends of others were seen when the commands of %s had been given up", id)
		}
	}
	thaw()
	for _, id := range hang {
		for deadline := time.Now().Add(time.Minute); len(p.processes(id)) != 1; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("commands of before still run in %s", id)
			}
		}
	}
}

// Commands that cannot be ended hold an upgrade up side by side.
func TestUpgradeBesideExecsThatCannotBeEnded(t *testing.T) {
	const count, each = 6, 4 * time.Second // the limits for the processes of one, and for its cgroup
	p := startPod(t)
	disk, thaw := frozenDisk(t)
	for i := range count {
		id := fmt.Sprint("hangs", i)
		p.run(id, "sleep 1000", disk)
		p.hangs(id, 1)
	}
	began := time.Now()
	err := p.upgrade(anotherBuild(t, 1))
	took := time.Since(began)
	thaw()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("upgraded after %v", took)
	if took >= count*each {
		t.Errorf("the upgrade took %v, as if it had waited for each of %d commands", took, count)
	}
}

// frozenDisk is a file system that containers which are changed by mount have at /disk:
// who writes there sleeps until it is thawed.
func frozenDisk(t *testing.T) (mount func(*specs.Spec, *api.CreateRequest), thaw func()) {
	t.Helper()
	run := func(name string, args ...string) {
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %q: %v: %s", name, args, err, out)
		}
	}
	dir, image := t.TempDir(), filepath.Join(t.TempDir(), "disk")
	run("truncate", "-s", "16M", image)
	run("mkfs.ext4", "-q", image)
	run("mount", "-o", "loop", image, dir)
	t.Cleanup(func() { run("umount", dir) })
	run("fsfreeze", "--freeze", dir)
	frozen := true
	thaw = func() {
		if frozen {
			frozen = false
			run("fsfreeze", "--unfreeze", dir)
		}
	}
	t.Cleanup(thaw)
	return func(s *specs.Spec, _ *api.CreateRequest) {
		s.Mounts = append(s.Mounts, specs.Mount{Destination: "/disk", Type: "bind", Source: dir, Options: []string{"bind"}})
	}, thaw
}

// hangs runs commands in a container that write to a frozen disk, and waits until they
// sleep.
func (p *pod) hangs(id string, commands int) {
	p.t.Helper()
	for i := range commands {
		if err := p.ExecStart(p.t.Context(), id, fmt.Sprint("exec", i), sh("echo > /disk/file"), false); err != nil {
			p.t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(time.Minute); p.sleeping(id) != commands; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Fatalf("%d of %d commands of %s sleep uninterruptibly", p.sleeping(id), commands, id)
		}
	}
}

// sleeping counts the processes of a container that sleep uninterruptibly.
func (p *pod) sleeping(id string) (count int) {
	for _, pid := range p.processes(id) {
		stat, _ := os.ReadFile("/proc/" + pid + "/stat")
		if _, rest, _ := strings.Cut(string(stat), ") "); strings.HasPrefix(rest, "D") {
			count++
		}
	}
	return count
}

// execNotes are what a successor ends the commands of a container by.
func (p *pod) execNotes(id string) []string {
	notes, _ := filepath.Glob(filepath.Join(p.dir, "containers", id, "minicri-exec-*"))
	return notes
}

// A command that is run while the successor does not know yet whether its container runs
// is none of those that it ends once it knows.
func TestExecsOfAContainerThatIsFoundLate(t *testing.T) {
	p := startPod(t)
	init := p.run("c", "while :; do sleep 1; done").Pid
	const waits = "while :; do sleep 1; done"
	if err := p.ExecStart(t.Context(), "c", "left", sh(waits), false); err != nil {
		t.Fatal(err)
	}
	p.killShim()
	reapOrphans()
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("?"), 0o600); err != nil {
		t.Fatal(err)
	}
	stat := fmt.Sprintf("/proc/%d/stat", init)
	p.startVia(fmt.Sprintf(`exec unshare --mount --propagation private sh -c 'mount --bind %s %s; exec %s "$@"' shim "$@"`, garbage, stat, shimBinary))
	p.awaitSupervisorLog("cannot be known", "container=c ")
	if err := p.ExecStart(t.Context(), "c", "ours", sh(waits), false); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("nsenter", "--mount", "--target", fmt.Sprint(p.pid()), "umount", stat).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := p.Kill(t.Context(), "c", uint32(unix.SIGCONT), false)
		if err == nil {
			break // it is found
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(time.Minute); p.shells("c") != 2; time.Sleep(10 * time.Millisecond) { // init and ours
		if time.Now().After(deadline) {
			t.Fatalf("%d shells run, its own and the command's are two", p.shells("c"))
		}
	}
	if err := p.ExecKill(t.Context(), "c", "ours", uint32(unix.SIGKILL), true); err != nil {
		t.Errorf("the command: %v", err)
	}
}
