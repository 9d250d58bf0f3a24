package container

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// untilGo begins a script that waits for release.
const untilGo = "until [ -e /go ]; do sleep 0.05; done; "

// release lets the container of the process continue, without asking the daemon.
func release(t *testing.T, pid int) {
	t.Helper()
	check(t, os.WriteFile(fmt.Sprintf("/proc/%d/root/go", pid), nil, 0o600))
}

func TestP34_DaemonKilledWhileContainersRun(t *testing.T) {
	p := newPod(t)
	lives := p.run("lives", forever)
	waits := p.create(shell("waits", "exit 5"))
	dies := p.run("dies", untilGo+"exit 33")
	oom := p.run("oom", untilGo+"tail /dev/zero", memory(16<<20))
	ended := p.run("ended", "exit 4")
	p.wantExit(ended, 4, "Error")
	before, pid := p.status(ended), p.info(lives).PID
	ending := []int{p.info(dies).PID, p.info(oom).PID}
	p.Kill()
	killed := time.Now()
	for _, pid := range ending {
		release(t, pid)
	}
	for _, pid := range ending {
		eventually(t, "two containers end while no daemon runs", func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
	}
	p.Start()
	started := time.Now()
	for id, state := range map[string]runtimeapi.ContainerState{lives: running, waits: created, dies: exited, oom: exited, ended: exited} {
		if now := p.status(id); now.State != state {
			t.Errorf("want %v at once, got %v", state, now)
		}
	}
	p.wantExit(dies, 33, "Error")
	p.wantExit(oom, 137, "OOMKilled")
	if at := time.Unix(0, p.status(dies).FinishedAt); at.Before(killed) || at.After(started) {
		t.Errorf("finished at %v, the daemon was gone from %v to %v", at, killed, started)
	}
	if after := p.status(ended); after.String() != before.String() {
		t.Errorf("was %v, is %v", before, after)
	}
	if p.info(lives).PID != pid || p.exec(lives, "echo hi") != "hi" {
		t.Errorf("process %d, was %d", p.info(lives).PID, pid)
	}
	check(t, p.start(waits))
	p.wantExit(waits, 5, "Error")
	check(t, p.stop(lives, 10))
	p.wantExit(lives, 10, "Error")
}

func (p *pod) killShim() {
	p.t.Helper()
	pids := shims(p.Node)
	if len(pids) != 1 {
		p.t.Fatalf("shims: %v", pids)
	}
	check(p.t, unix.Kill(pids[0], unix.SIGKILL))
}

// cri: ContainerStatus.reason
func TestKilledShim(t *testing.T) {
	p := newPod(t)
	lives, dies := p.run("lives", forever), p.run("dies", untilGo+"exit 3")
	waits := p.create(shell("waits", "exit 5"))
	pid := p.info(dies).PID
	p.killShim()
	release(t, pid)
	eventually(t, "the daemon notices", func() bool { return strings.Contains(p.Log(), "a supervisor is gone") })
	eventually(t, "the container is adopted, by itself", func() bool { return p.status(lives).State == running })
	same(t, "exec", p.exec(lives, "echo hi"), "hi")
	end := p.awaitExit(dies)
	known := end.ExitCode == 3 && end.Reason == "Error"
	if !known && (end.ExitCode != 255 || end.Reason != "Unknown") {
		t.Errorf("want its exit code, or 255 and Unknown: %v", end)
	}
	check(t, p.start(waits))
	p.awaitExit(waits)
	check(t, p.stop(lives, 10))
	for _, id := range []string{lives, dies, waits} {
		check(t, p.remove(id))
	}
	p.wantExit(p.run("lives", "exit 6"), 6, "Error")
}

// cri: ContainerStatus.exit_code
func TestKilledShimAndDaemon(t *testing.T) {
	p := newPod(t)
	lives, dies := p.run("lives", forever), p.run("dies", forever)
	pid := p.info(dies).PID
	p.Kill()
	p.killShim()
	check(t, unix.Kill(pid, unix.SIGKILL))
	p.Start()
	eventually(t, "the container is adopted", func() bool { return p.status(lives).State == running })
	if end := p.awaitExit(dies); end.ExitCode != 255 && end.ExitCode != 137 {
		t.Errorf("got %v", end)
	}
	same(t, "exec", p.exec(lives, "echo hi"), "hi")
	check(t, p.remove(lives))
}

// What a shim has left of containers that were removed while it was gone does
// not keep the pod from being removed.
//
// cri: RemoveContainerRequest.container_id
func TestRemovalWithoutAShim(t *testing.T) {
	p := newPod(t)
	id := p.run("app", "exit 1")
	p.wantExit(id, 1, "Error")
	p.Kill()
	p.killShim()
	p.Start()
	check(t, p.remove(id))
	p.wantExit(p.run("app", "exit 2"), 2, "Error")
	p.RemovePod(p.id)
}
