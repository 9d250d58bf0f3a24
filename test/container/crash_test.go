package container

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// crashRow is an operation on a container, with the points that it passes (see
// packages container and failpoint), and what happens at each.
type crashRow struct {
	name   string
	points []string
	// prepare brings the container to where the operation begins.
	prepare func(*trial)
	call    func(context.Context, *trial) error
	faults  []string
}

const (
	fails     = "error"
	killed    = "kill"
	cancelled = "cancel"
)

// crashRows has one case for each step. Package container has all of them in memory.
var crashRows = []crashRow{
	{"create", []string{
		"container/record after", "container/rootfs after", "container/sources after", "container/spec after",
		"container/volumes after", "container/labels after", "container/supervisor after", "container/create after",
		"container/recheck after",
	}, func(*trial) {}, callCreate, []string{killed}},
	{"start", []string{"container/start after"}, makeCreated, callStart, []string{killed}},
	{"remove", []string{
		"container/kill after", "container/delete after", "container/remove rootfs after", "container/remove record after",
	}, makeRunning, callRemove, []string{killed}},
	{"undo", []string{"container/delete after"}, func(c *trial) {
		c.also = []string{"container/recheck before error"}
	}, callCreate, []string{fails}},
	{"cancelled", []string{"container/create after"}, func(*trial) {}, callCreate, []string{cancelled}},
}

// trial is one case: a fault at a point of an operation on the container "case".
// In the pod another one, the witness, runs all the time.
type trial struct {
	*pod
	nodetest.Failpoints
	point   string
	also    []string // a second failpoint
	witness *runtimeapi.ContainerStatus
	config  *runtimeapi.ContainerConfig
	id      string
}

// quiet is a script that starts no other process.
const quiet = "exec sleep 1000000"

// cri: Mount.container_path
func TestCrashes(t *testing.T) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	check(t, err)
	count := 0
	for _, row := range crashRows {
		count += len(row.points) * len(row.faults)
		t.Run(row.name, func(t *testing.T) {
			points := nodetest.Failpoints(filepath.Join(t.TempDir(), "points"))
			n := newNode(t, nodetest.Binaries(binaries), points.Option())
			importData(n)
			p := runPod(t, n, "web")
			witness := p.run("witness", quiet)
			harness.Eventually(t, "the witness runs", func() bool { return harness.ProcStatus(t, p.info(witness).PID, "Name") == "sleep" })
			before := p.Look()
			for _, point := range row.points {
				for _, fault := range row.faults {
					t.Run(point+"/"+fault, func(t *testing.T) {
						p.t = t
						c := &trial{pod: p, Failpoints: points, point: point, witness: p.status(witness)}
						c.test(row, fault)
					})
				}
				// Once for all faults at a point: it is what takes time.
				for _, difference := range p.Differences(before) {
					t.Errorf("%s: %s", point, difference)
				}
			}
			p.t = t
		})
	}
	fmt.Printf("container crash matrix: %d cases\n", count)
}

// An init may end before its container is listed: the end is told all the same, after the creation.
func TestEndBeforeItIsListed(t *testing.T) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	check(t, err)
	points := nodetest.Failpoints(filepath.Join(t.TempDir(), "points"))
	p := runPod(t, newNode(t, nodetest.Binaries(binaries), points.Option()), "web")
	stream := p.listen()
	points.Arm(t, "container/recheck after hang")
	made := beside(func() error { _, err := p.tryCreate(shell("one", quiet)); return err })
	harness.Eventually(t, "the point is reached", points.WasHit)
	harness.Eventually(t, "the daemon hears of the end", func() bool {
		for _, process := range harness.Processes() {
			if slices.Contains(process.Args, "init") && slices.Contains(p.Supervisors(), process.Parent) {
				_ = unix.Kill(process.PID, unix.SIGKILL) // that of the round before may have ended it
			}
		}
		return regexp.MustCompile(`container ended.*container=one`).MatchString(p.Log())
	})
	points.Disarm(t)
	check(t, <-made)
	same(t, "events", p.events(stream, "one STOPPED"), []string{"one CREATED: READY one EXITED", "one STOPPED: READY one EXITED"})
}

// A source that has answered may not do so when it is accessed again: the creation ends at its limit all the same.
func TestSourceThatHangsLater(t *testing.T) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	check(t, err)
	points := nodetest.Failpoints(filepath.Join(t.TempDir(), "points"))
	p := runPod(t, newNode(t, nodetest.Binaries(binaries), points.Option(), nodetest.Config("[limits]\ncreate = '10s'")), "web")
	dead, volume := harness.DeadMount(t), t.TempDir()
	points.Arm(t, "container/spec before hang")
	made := beside(func() error { return p.createErr(shell("one", quiet, mounted(volume, "/volume"))) })
	harness.Eventually(t, "the point is reached", points.WasHit)
	check(t, unix.Mount(dead, volume, "", unix.MS_BIND, ""))
	t.Cleanup(func() { check(t, unix.Unmount(volume, unix.MNT_DETACH)) })
	points.Disarm(t)
	wantCode(t, <-made, codes.DeadlineExceeded, "not done within 10s")
}

// A daemon that is killed while the kernel keeps one of its threads, which waits for a volume's server, does not end.
// The next one takes over its directories and sockets, the pods go on, and the creation is undone.
//
// attack: denial of service: the server of a volume (FUSE) takes a request and does not answer; the daemon is killed
// held: only that container waits; the next daemon serves after two seconds
func TestDaemonThatCannotEnd(t *testing.T) {
	p := runPod(t, newNode(t, nodetest.Config("[nri]\nenabled = true\nsocket = '"+filepath.Join(t.TempDir(), "nri.sock")+"'")), "web")
	lives, doomed := p.run("lives", forever), p.PID()
	stuck, asked := harness.StuckMount(t)
	created := beside(func() error { return p.createErr(shell("one", quiet, mounted(stuck, "/volume"))) })
	<-asked
	check(t, unix.Kill(doomed, unix.SIGKILL))
	harness.Eventually(t, "it is doomed", func() bool { return process.Doomed(doomed) })
	p.Start()
	wantError(t, <-created)
	same(t, "the state of a container", p.status(lives).State, running)
	same(t, "what an exec prints", p.exec(lives, "echo hello"), "hello")
	p.run("two", forever)
	expect(t, process.Doomed(doomed), "the killed daemon has ended")
}

func (c *trial) test(row crashRow, fault string) {
	c.config = shell("case", quiet, imageMount("/data"), noLog)
	row.prepare(c)
	if fault == cancelled {
		c.cancel(row.call)
	} else {
		c.strike(row.call, fault)
	}
	c.Disarm(c.t)
	if !c.Running() {
		c.Start()
	}
	same(c.t, "the other container changed", c.status(c.witness.Id), c.witness)
	c.exec(c.witness.Id, "true")
	c.runAgain()
}

func (c *trial) strike(call func(context.Context, *trial) error, fault string) {
	c.Arm(c.t, append([]string{c.point + " " + fault}, c.also...)...)
	wantError(c.t, call(harness.Limited(c.t), c))
	expect(c.t, c.WasHit(), "the point was not reached")
	if fault == killed {
		harness.Eventually(c.t, "the daemon ends", func() bool { return !c.Running() })
	}
}

// cancel: the caller goes away at the point (P61).
func (c *trial) cancel(call func(context.Context, *trial) error) {
	c.Arm(c.t, c.point+" hang")
	ctx, cancel := context.WithCancel(harness.Limited(c.t))
	defer cancel()
	done := beside(func() error { return call(ctx, c) })
	harness.Eventually(c.t, "the point is reached", c.WasHit)
	cancel()
	wantCode(c.t, <-done, codes.Canceled)
}

// removeListed: what is listed exists, and can be stopped and removed.
func (c *trial) removeListed() {
	for _, listed := range c.list(nil) {
		if listed.Id == c.witness.Id {
			continue
		}
		inside := c.inCgroup(c.info(listed.Id).CgroupsPath)
		same(c.t, fmt.Sprintf("%v, with the processes %v", listed.State, inside), listed.State != exited, len(inside) > 0)
		err := errors.Join(c.stop(listed.Id, 0), c.remove(listed.Id))
		expect(c.t, err == nil, "stop and remove what is listed: %v", err)
	}
}

// runAgain: the name is free, at once or when what was cut off is rolled back. A
// creation whose caller went away at its end succeeds, and may be listed late.
func (c *trial) runAgain() {
	var id string
	harness.Eventually(c.t, "the name is free", func() (free bool) {
		c.removeListed()
		var err error
		id, err = c.tryCreate(c.config)
		return err == nil
	})
	check(c.t, c.start(id))
	c.exec(id, "true")
	check(c.t, c.remove(id))
}

func makeCreated(c *trial) { c.id = c.create(c.config) }

func makeRunning(c *trial) {
	makeCreated(c)
	check(c.t, c.start(c.id))
}

func callCreate(ctx context.Context, c *trial) error {
	_, err := c.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: c.pod.id, Config: c.config, SandboxConfig: c.pod.config})
	return err
}

func callStart(_ context.Context, c *trial) error  { return c.start(c.id) }
func callRemove(_ context.Context, c *trial) error { return c.remove(c.id) }
