package client_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/test/harness"
)

// The end of a container is seen while the successor still ends commands in others that
// cannot be ended: they sleep uninterruptibly.
func TestExitsBesideExecsThatCannotBeEnded(t *testing.T) {
	p := startPod(t)
	disk := t.TempDir()
	freeze := harness.Disk(t, disk)
	thaw := freeze()
	hang := []string{"hangs0", "hangs1"} // each for as many times the limit of one command
	for _, id := range hang {
		p.run(id, "sleep 1000", func(s *specs.Spec, _ *api.CreateRequest) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/disk", Type: "bind", Source: disk, Options: []string{"bind"}})
		})
		p.hangs(id, 10)
	}
	ending := make(map[string]int32)
	for i := range 10 {
		id := fmt.Sprint("ends", i)
		ending[id] = p.run(id, stays).Pid
	}
	p.succeed()
	for _, pid := range ending {
		p.check(unix.Kill(int(pid), unix.SIGKILL))
	}
	for id := range ending {
		p.awaitExit(t.Context(), id)
	}
	for _, id := range hang { // notes are what a successor ends commands by
		notes, _ := filepath.Glob(filepath.Join(p.dir, "containers", id, "minicri-exec-*"))
		harness.Want(t, len(notes) != 0, "ends of others were seen when the commands of %s had been given up", id)
	}
	thaw()
	for _, id := range hang {
		p.eventually("commands of before end in "+id, func() bool { return len(p.processes(id)) == 1 })
	}
}

// hangs runs commands in a container that write to a frozen disk, and waits until they sleep uninterruptibly.
func (p *pod) hangs(id string, commands int) {
	for i := range commands {
		p.check(p.ExecStart(p.t.Context(), id, fmt.Sprint("exec", i), sh("echo > /disk/file"), false))
	}
	p.eventually("all commands of "+id+" hang", func() bool {
		sleeping := 0
		for _, pid := range p.processes(id) {
			if processState(pid) == "D" {
				sleeping++
			}
		}
		return sleeping == commands
	})
}

// A log on a disk that hangs keeps a successor neither from serving nor from seeing how
// its container ends; what was written meanwhile is in the log when the disk goes on.
func TestSuccessorBesideALogThatHangs(t *testing.T) {
	disk := t.TempDir()
	freeze := harness.Disk(t, disk) // its end comes after that of the pod, which has files there
	p := startPod(t)
	onDisk := func(_ *specs.Spec, r *api.CreateRequest) { r.LogPath = filepath.Join(disk, r.Id) }
	pid := p.run("c", "trap 'echo last; exit 7' TERM; echo first; "+stays, onDisk).Pid
	p.run("other", stays, onDisk)
	p.awaitFile(disk+"/c", "first")
	thaw := freeze()
	p.succeed()
	p.wantExec("other", "echo hi", "hi\n")
	p.check(unix.Kill(int(pid), unix.SIGTERM))
	e := p.awaitExit(t.Context(), "c").Exit
	harness.Want(t, !e.CodeKnown || e.Code == 7, "exit %v, want 7", e)
	thaw()
	p.awaitFile(disk+"/c", "last")
	p.wantExec("other", "echo hi", "hi\n")
}

// A container has ended, and its last words wait for a disk, in the spool and in the fifo, when its
// supervisor is killed and the daemon lets go of it, which has heard of the end: they come to the log.
func TestLastWordsOutliveTheSupervisor(t *testing.T) {
	disk := t.TempDir()
	freeze := harness.Disk(t, disk)
	p := startPod(t)
	log := disk + "/c"
	script := "trap 'echo begun; sleep 1; seq 1 9000; echo last >&2; exit 7' TERM; echo first; " + stays
	pid := p.run("c", script, func(_ *specs.Spec, r *api.CreateRequest) { r.LogPath = log }).Pid
	p.awaitFile(log, "first")
	thaw := freeze()
	p.check(unix.Kill(int(pid), unix.SIGTERM))
	p.awaitExit(t.Context(), "c")
	p.held["c"].Release()
	p.killShim()
	thaw()
	p.restart()
	e := p.awaitExit(t.Context(), "c").Exit
	harness.Want(t, e.Code == 7 && e.CodeKnown, "the successor says exit %v, want 7", e)
	p.awaitFile(log, "stderr F last")
	p.awaitFile(log, "stdout F 9000")
	p.eventually("a successor has nothing to look for", func() bool { return count(t, p.dir+"/io") == 0 })
}
