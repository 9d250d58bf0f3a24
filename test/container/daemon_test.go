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
		same(t, "state at once", p.status(id).State.String(), state.String())
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

// A supervisor that dies, with the daemon or alone, is replaced by one that adopts its
// containers, and that knows how one has ended meanwhile, or that it does not know. What the
// dead one has left of containers that ended before keeps no one from removing them.
//
// cri: ContainerStatus.reason ContainerStatus.exit_code RemoveContainerRequest.container_id
func TestKilledShim(t *testing.T) {
	for name, withDaemon := range map[string]bool{"alone": false, "with the daemon": true} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			lives, dies, ended := p.run("lives", forever), p.run("dies", untilGo+"exit 3"), p.run("ended", "exit 1")
			waits := p.create(shell("waits", "exit 5"))
			p.wantExit(ended, 1, "Error")
			pid := p.info(dies).PID
			if withDaemon {
				p.Kill()
			}
			p.killShim()
			release(t, pid)
			if withDaemon {
				p.Start()
				check(t, p.remove(ended))
			} else {
				eventually(t, "the daemon notices", func() bool { return strings.Contains(p.Log(), "a supervisor is gone") })
			}
			eventually(t, "the container is adopted, by itself", func() bool { return p.status(lives).State == running })
			same(t, "exec", p.exec(lives, "echo hi"), "hi")
			end := p.awaitExit(dies)
			if known := end.ExitCode == 3 && end.Reason == "Error"; !known && (end.ExitCode != 255 || end.Reason != "Unknown") {
				t.Errorf("want its exit code, or 255 and Unknown: %v", end)
			}
			check(t, p.start(waits))
			p.awaitExit(waits)
			check(t, p.stop(lives, 10))
			for _, id := range []string{lives, dies, waits, ended} {
				check(t, p.remove(id))
			}
			p.wantExit(p.run("lives", "exit 6"), 6, "Error")
			p.RemovePod(p.id)
		})
	}
}
