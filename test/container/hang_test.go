package container

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// While a container hangs in a mount all calls about others are answered, before it is
// given up.
//
// cri: ContainerConfig.mounts
//
// attack: what a container can stop: by a volume whose server (FUSE) does not answer, while it is mounted
// held: that container, until the limit of creations
func TestP41_DeadMountOfAnotherContainer(t *testing.T) {
	n := newNode(t, harness.Config("[limits]\ncreate = '30s'"))
	p, other := runPod(t, n, "hangs"), runPod(t, n, "other")
	witness, neighbour := other.run("witness", forever), p.run("neighbour", forever)
	config := shell("hangs", forever, mounted(filepath.Join(harness.DeadMount(t), "volume"), "/volume"))
	hangs := make(chan error, 1)
	go func() {
		_, err := p.tryCreate(config)
		hangs <- err
	}()
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		other.list(nil)
		other.status(witness)
		other.address()
		other.exec(witness, "true")
		short := other.run("short", "true")
		check(t, other.stop(short, 0))
		check(t, other.remove(short))
		same(t, "exec in the same pod", p.exec(neighbour, "echo here"), "here")
		if len(hangs) > 0 {
			t.Fatalf("it was given up, or the mount is not dead, when the others were answered: %v", <-hangs)
		}
	}
	err := <-hangs
	wantCode(t, err, codes.Unavailable)
	if !strings.Contains(err.Error(), "/volume") {
		t.Errorf("the error does not name the path: %v", err)
	}
	// It has left nothing behind: its name is free.
	config.Mounts = nil
	check(t, p.start(p.create(config)))
}

// disk is a filesystem in a file, mounted.
type disk struct {
	t   *testing.T
	dir string
}

func newDisk(t *testing.T) *disk {
	t.Helper()
	d := &disk{t, t.TempDir()}
	file := filepath.Join(t.TempDir(), "disk")
	d.command("truncate", "-s", "16M", file)
	d.command("mkfs.ext4", "-q", file)
	d.command("mount", "-o", "loop", file, d.dir)
	t.Cleanup(func() { d.command("umount", d.dir) })
	return d
}

func (d *disk) command(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}

// freeze lets anyone who writes sleep, uninterruptibly, until the thaw.
func (d *disk) freeze() (thaw func()) {
	d.t.Helper()
	d.command("fsfreeze", "--freeze", d.dir)
	thaw = sync.OnceFunc(func() { d.command("fsfreeze", "--unfreeze", d.dir) })
	d.t.Cleanup(thaw)
	return thaw
}

// sleepsUninterruptibly reports whether any process in a container's cgroup does.
func (p *pod) sleepsUninterruptibly(cgroup string) bool {
	return slices.ContainsFunc(p.pidsInCgroup(cgroup), func(pid int) bool {
		stat, err := process.ReadStat(pid)
		return err == nil && stat.State == 'D'
	})
}

// cri: ContainerFilter.id
func TestP40_RemoveOfWhatSleepsUninterruptibly(t *testing.T) {
	const kill = 2 * time.Second // also the time in which a supervisor has to answer
	n := newNode(t, harness.Config("[limits]\nkill = '2s'"))
	p, together := runPod(t, n, "web"), runPod(t, n, "together", podPID(runtimeapi.NamespaceMode_POD))
	witness := p.run("witness", forever)
	const writes = "while true; do echo x >> /disk/file; sleep 0.01; done"
	const child = "(" + writes + ") & while true; do sleep 1; done"
	for name, c := range map[string]struct {
		pod    *pod
		config *runtimeapi.ContainerConfig
	}{
		"init":                    {p, shell("app", writes)},
		"child of init":           {p, shell("app", child)},
		"child that outlives all": {together, shell("app", child, pidMode(runtimeapi.NamespaceMode_POD, ""))},
	} {
		t.Run(name, func(t *testing.T) {
			p, pod := c.pod, *p
			p.t, pod.t = t, t
			d := newDisk(t)
			mounted(d.dir, "/disk")(c.config)
			id := p.create(c.config)
			check(t, p.start(id))
			cgroup := p.info(id).CgroupsPath
			thaw := d.freeze()
			eventually(t, "the container sleeps", func() bool { return p.sleepsUninterruptibly(cgroup) })
			for _, call := range []func() error{func() error { return p.stop(id, 0) }, func() error { return p.remove(id) }} {
				if err := p.inTime(20*kill, call); err != nil {
					wantCode(t, err, codes.Unavailable)
				}
			}
			if !p.sleepsUninterruptibly(cgroup) {
				t.Fatal("the process does not sleep any more: this proves nothing")
			}
			if s := p.list(&runtimeapi.ContainerFilter{Id: id}); len(s) != 1 {
				t.Errorf("while a process of it is there, the container is listed: %v", s)
			}
			same(t, "another container", pod.exec(witness, "echo here"), "here")
			thaw()
			eventually(t, "it is removed", func() bool { return p.remove(id) == nil })
			if left := p.pidsInCgroup(cgroup); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			check(t, p.remove(p.create(c.config)))
		})
	}
	p.t, together.t = t, t
}

// inTime fails the test if a call takes longer than the limit.
func (p *pod) inTime(limit time.Duration, call func() error) error {
	p.t.Helper()
	began := time.Now()
	err := call()
	if took := time.Since(began); took > limit {
		p.t.Errorf("it took %v", took)
	}
	return err
}
