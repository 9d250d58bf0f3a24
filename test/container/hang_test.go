package container

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// cri: ContainerConfig.mounts
//
// attack: what a container can stop: by a volume whose server (FUSE) does not answer, while it is mounted
// held: that container, until the limit of creations
func TestP41_DeadMountOfAnotherContainer(t *testing.T) {
	n := newNode(t, harness.Config("[limits]\ncreate = '15s'"))
	p, other := runPod(t, n, "hangs"), runPod(t, n, "other")
	witness, neighbour := other.run("witness", forever), p.run("neighbour", forever)
	calls := other.calls(witness)
	for range 5 {
		calls.round()
	}
	before := calls.slowest()
	config := shell("hangs", forever, mounted(filepath.Join(harness.DeadMount(t), "volume"), "/volume"))
	hangs := make(chan error, 1)
	go func() {
		_, err := p.tryCreate(config)
		hangs <- err
	}()
	time.Sleep(100 * time.Millisecond)
	// All of it is the machine's, and a call that waits for the container takes seconds.
	// While the machine is busier than before there are further rounds, as long as the
	// container hangs.
	most := 2*before + 100*time.Millisecond
	calls = other.calls(witness)
	for calls.round(); calls.slowest() > most && len(hangs) == 0; {
		calls.round()
	}
	if during := calls.slowest(); during > most {
		t.Errorf("while a container of another pod hangs, the slowest call took %v, before it took %v", during, before)
	}
	same(t, "exec in the same pod", p.exec(neighbour, "echo here"), "here")
	select {
	case err := <-hangs:
		t.Fatalf("the mount is not dead: %v", err)
	default:
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

// timedCalls are the calls of a kubelet's life, and how long each took at its best: a
// busy machine delays some, one that has to wait for another is always late.
type timedCalls struct {
	calls []func()
	best  []time.Duration
}

func (p *pod) calls(witness string) *timedCalls {
	p.t.Helper()
	var id string
	return &timedCalls{calls: []func(){
		func() { p.list(nil) },
		func() { p.status(witness) },
		func() { p.address() },
		func() { p.exec(witness, "true") },
		func() { id = p.create(shell("short", "true")) },
		func() { check(p.t, p.start(id)) },
		func() { check(p.t, p.stop(id, 0)) },
		func() { check(p.t, p.remove(id)) },
	}}
}

// round makes each call once.
func (c *timedCalls) round() {
	for i, call := range c.calls {
		began := time.Now()
		call()
		took := time.Since(began)
		if i == len(c.best) {
			c.best = append(c.best, took)
		}
		c.best[i] = min(c.best[i], took)
	}
}

// slowest is how long that call takes which takes longest.
func (c *timedCalls) slowest() time.Duration { return slices.Max(c.best) }

// disk is a filesystem in a file, mounted.
type disk struct {
	t   *testing.T
	dir string
}

func newDisk(t *testing.T, size string) *disk {
	t.Helper()
	d := &disk{t, t.TempDir()}
	file := filepath.Join(t.TempDir(), "disk")
	d.command("truncate", "-s", size, file)
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
	frozen := true
	thaw = func() {
		if frozen {
			frozen = false
			d.command("fsfreeze", "--unfreeze", d.dir)
		}
	}
	d.t.Cleanup(thaw)
	return thaw
}

// sleepsUninterruptibly reports whether any process in a container's cgroup does.
func (p *pod) sleepsUninterruptibly(cgroup string) bool {
	return slices.ContainsFunc(p.pidsInCgroup(cgroup), func(pid string) bool {
		stat, _ := os.ReadFile("/proc/" + pid + "/stat") // it may have ended
		_, rest, _ := strings.Cut(string(stat), ") ")
		return strings.HasPrefix(rest, "D")
	})
}

// cri: ContainerFilter.id
func TestP40_RemoveOfWhatSleepsUninterruptibly(t *testing.T) {
	const kill = 2 * time.Second // also the time in which a supervisor has to answer
	n := newNode(t, harness.Config("[limits]\nkill = '2s'"))
	p, together := runPod(t, n, "web"), runPod(t, n, "together", podPID(runtimeapi.NamespaceMode_POD))
	witness := p.run("witness", forever)
	const writes = "while true; do echo x >> /disk/file; sleep 0.01; done"
	for name, c := range map[string]struct {
		pod    *pod
		script string
		opt    option
	}{
		"init":                    {p, writes, nothing},
		"child of init":           {p, "(" + writes + ") & while true; do sleep 1; done", nothing},
		"child that outlives all": {together, "(" + writes + ") & while true; do sleep 1; done", pidMode(runtimeapi.NamespaceMode_POD, "")},
	} {
		t.Run(name, func(t *testing.T) {
			p, pod := c.pod, *p
			p.t, pod.t = t, t
			d := newDisk(t, "16M")
			config := shell("app", c.script, c.opt, mounted(d.dir, "/disk"))
			id := p.create(config)
			check(t, p.start(id))
			cgroup := p.info(id).CgroupsPath
			thaw := d.freeze()
			eventually(t, "the container sleeps", func() bool { return p.sleepsUninterruptibly(cgroup) })
			for _, err := range []error{p.inTime(20*kill, func() error { return p.stop(id, 0) }), p.inTime(20*kill, func() error { return p.remove(id) })} {
				if err != nil {
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
			check(t, p.remove(p.create(config)))
		})
	}
	p.t, together.t = t, t
}

func nothing(*runtimeapi.ContainerConfig) {}

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
