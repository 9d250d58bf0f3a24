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
		p.run(id, "sleep 1000", disk.mount)
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
	disk.thaw()
	for _, id := range hang {
		for deadline := time.Now().Add(time.Minute); len(p.processes(id)) != 1; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("commands of before still run in %s", id)
			}
		}
	}
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

// mount has a container have it at /disk.
func (d *disk) mount(s *specs.Spec, _ *api.CreateRequest) {
	s.Mounts = append(s.Mounts, specs.Mount{Destination: "/disk", Type: "bind", Source: d.dir, Options: []string{"bind"}})
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

// awaitFile waits until a file has the words.
func (p *pod) awaitFile(path, words string) {
	p.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		content, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(content), words) {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("%q does not come to be in %s: %s, %v", words, path, content, err)
		}
	}
}

// execNotes are what a successor ends the commands of a container by.
func (p *pod) execNotes(id string) []string {
	notes, _ := filepath.Glob(filepath.Join(p.dir, "containers", id, "minicri-exec-*"))
	return notes
}

// A log on a disk that hangs keeps a successor neither from serving nor from seeing how
// its container ends; what was written meanwhile is in the log when the disk goes on.
func TestSuccessorBesideALogThatHangs(t *testing.T) {
	disk := newDisk(t) // its end comes after that of the pod, which has files there
	p := startPod(t)
	script := "trap 'echo last; exit 7' TERM; echo first; while :; do sleep 1; done"
	onDisk := func(name string) func(*specs.Spec, *api.CreateRequest) {
		return func(_ *specs.Spec, r *api.CreateRequest) { r.LogPath = filepath.Join(disk.dir, name) }
	}
	pid := p.run("c", script, onDisk("c.log")).Pid
	p.run("other", "while :; do sleep 1; done", onDisk("other.log"))
	p.awaitFile(filepath.Join(disk.dir, "c.log"), "first")
	disk.freeze()
	p.killShim()
	reapOrphans()
	p.restart()
	if r, err := p.ExecSync(t.Context(), "other", sh("echo hi"), time.Minute, 10); err != nil || string(r.Stdout) != "hi\n" {
		t.Errorf("exec: %+v, %v", r, err)
	}
	if err := unix.Kill(int(pid), unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if e := p.awaitExit(t.Context(), "c").Exit; e.CodeKnown && e.Code != 7 {
		t.Errorf("exit %v, want 7", e)
	}
	disk.thaw()
	p.awaitFile(filepath.Join(disk.dir, "c.log"), "last")
	if r, err := p.ExecSync(t.Context(), "other", sh("echo hi"), time.Minute, 10); err != nil || string(r.Stdout) != "hi\n" {
		t.Errorf("exec: %+v, %v", r, err)
	}
}
