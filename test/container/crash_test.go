package container

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// quiet is a script that starts no other process.
const quiet = "exec sleep 1000000"

// newFailpoints makes a node whose daemon has failpoints.
func newFailpoints(t *testing.T, options ...nodetest.Option) (*nodetest.Node, nodetest.Failpoints) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	check(t, err)
	points := nodetest.Failpoints(filepath.Join(t.TempDir(), "points"))
	return newNode(t, append(options, nodetest.Binaries(binaries), points.Option())...), points
}

// TestCrashes kills the daemon after each step of creation, start and removal. Package container has all cases of the
// matrix in memory. Another container of the pod runs all the time, and the name of the container is free afterwards.
//
// cri: Mount.container_path
func TestCrashes(t *testing.T) {
	n, points := newFailpoints(t)
	importData(n)
	p := runPod(t, n, "web")
	witness := p.run("witness", quiet)
	harness.Eventually(t, "the witness runs", func() bool { return harness.ProcStatus(t, p.info(witness).PID, "Name") == "sleep" })
	was, before := p.status(witness), p.Look()
	config := shell("case", quiet, imageMount("/data"), noLog)
	for _, row := range []struct{ operation, steps string }{
		{"create", "record rootfs sources spec volumes labels supervisor create recheck"},
		{"start", "start"},
		{"remove", "kill delete remove-rootfs remove-record"},
	} {
		for name := range strings.FieldsSeq(row.steps) {
			t.Run(row.operation+"/"+name, func(t *testing.T) {
				p.t = t
				call := func() error { return p.createErr(config) }
				if row.operation != "create" {
					id := p.create(config)
					call = func() error { return p.start(id) }
					if row.operation == "remove" {
						check(t, p.start(id))
						call = func() error { return p.remove(id) }
					}
				}
				points.Arm(t, "container/"+strings.ReplaceAll(name, "-", " ")+" after kill")
				wantError(t, call())
				harness.Eventually(t, "the daemon ends", func() bool { return !p.Running() })
				points.Disarm(t)
				p.Start()
				same(t, "the other container", p.status(witness), was)
				p.exec(witness, "true")
				harness.Eventually(t, "the name is free, when what was cut off is rolled back", func() bool {
					p.removeListed(t, witness)
					return p.createErr(config) == nil
				})
				p.removeListed(t, witness)
				same(t, "differences", p.Differences(before), nil)
			})
		}
	}
	p.t = t
}

// A source that has answered may not do so when it is accessed again: the creation ends at its limit all the same.
func TestSourceThatHangsLater(t *testing.T) {
	n, points := newFailpoints(t, nodetest.Config("[limits]\ncreate = '10s'"))
	p := runPod(t, n, "web")
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

// removeListed stops and removes the listed containers but one. A container that has not ended has processes.
func (p *pod) removeListed(t *testing.T, but string) {
	for _, listed := range p.list(nil) {
		if listed.Id == but {
			continue
		}
		inside := p.inCgroup(p.info(listed.Id).CgroupsPath)
		same(t, fmt.Sprintf("%v, with the processes %v", listed.State, inside), listed.State != exited, len(inside) > 0)
		check(t, errors.Join(p.stop(listed.Id, 0), p.remove(listed.Id)))
	}
}
