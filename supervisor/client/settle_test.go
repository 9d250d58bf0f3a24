package client_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// The end of a container is seen while the successor still ends commands in others that
// cannot be ended: they sleep uninterruptibly.
func TestExitsBesideExecsThatCannotBeEnded(t *testing.T) {
	p := startPod(t)
	disk := newDisk(t)
	disk.freeze()
	hang := []string{"hangs0", "hangs1"} // each for as many times the limit of one command
	for _, id := range hang {
		p.run(id, "sleep 1000", func(s *specs.Spec, _ *api.CreateRequest) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/disk", Type: "bind", Source: disk.dir, Options: []string{"bind"}})
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
		if notes, _ := filepath.Glob(filepath.Join(p.dir, "containers", id, "minicri-exec-*")); len(notes) == 0 {
			t.Errorf("ends of others were seen when the commands of %s had been given up", id)
		}
	}
	disk.thaw()
	for _, id := range hang {
		p.eventually("commands of before end in "+id, func() bool { return len(p.processes(id)) == 1 })
	}
}

// hangs runs commands in a container that write to a frozen disk, and waits until they
// sleep uninterruptibly.
func (p *pod) hangs(id string, commands int) {
	p.t.Helper()
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

// disk is a file system of its own. While it is frozen who writes there sleeps.
type disk struct {
	t      *testing.T
	dir    string
	frozen bool
}

func newDisk(t *testing.T) *disk {
	t.Helper()
	d := &disk{t: t, dir: t.TempDir()}
	image := filepath.Join(t.TempDir(), "disk")
	d.run("truncate", "-s", "16M", image)
	d.run("mkfs.ext4", "-q", image)
	d.run("mount", "-o", "loop", image, d.dir)
	t.Cleanup(func() { d.run("umount", d.dir) })
	return d
}

func (d *disk) run(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}

func (d *disk) freeze() {
	d.t.Helper()
	d.run("fsfreeze", "--freeze", d.dir)
	d.frozen = true
	d.t.Cleanup(d.thaw)
}

func (d *disk) thaw() {
	if d.frozen {
		d.frozen = false
		d.run("fsfreeze", "--unfreeze", d.dir)
	}
}

// A log on a disk that hangs keeps a successor neither from serving nor from seeing how
// its container ends; what was written meanwhile is in the log when the disk goes on.
func TestSuccessorBesideALogThatHangs(t *testing.T) {
	disk := newDisk(t) // its end comes after that of the pod, which has files there
	p := startPod(t)
	onDisk := func(_ *specs.Spec, r *api.CreateRequest) { r.LogPath = filepath.Join(disk.dir, r.Id) }
	pid := p.run("c", "trap 'echo last; exit 7' TERM; echo first; "+stays, onDisk).Pid
	p.run("other", stays, onDisk)
	p.awaitFile(disk.dir+"/c", "first")
	disk.freeze()
	p.succeed()
	p.wantExec("other", "echo hi", "hi\n")
	p.check(unix.Kill(int(pid), unix.SIGTERM))
	if e := p.awaitExit(t.Context(), "c").Exit; e.CodeKnown && e.Code != 7 {
		t.Errorf("exit %v, want 7", e)
	}
	disk.thaw()
	p.awaitFile(disk.dir+"/c", "last")
	p.wantExec("other", "echo hi", "hi\n")
}
