package container

import (
	"bytes"
	"context"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// cri: ExecSync ExecSyncResponse.stderr
func TestExecSync(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	answer, err := p.tryExec(id, 0, "/bin/sh", "-c", "echo out; echo err >&2; exit 42")
	check(t, err)
	expect(t, string(answer.Stdout) == "out\n" && string(answer.Stderr) == "err\n" && answer.ExitCode == 42, "got %v", answer)
	answer, err = p.tryExec(id, 0, "sh", "-c", "kill -9 $$")
	check(t, err)
	expect(t, answer.ExitCode == 137, "killed: got %v", answer)
	answer, err = p.tryExec(id, 0, "/no/such")
	expect(t, err != nil || answer.ExitCode != 0, "a program that does not exist: %v", answer)
	// Both outputs together have a limit, that of a message.
	answer, err = p.tryExec(id, 0, "/bin/sh", "-c", "head -c 20000000 /dev/zero; head -c 20000000 /dev/zero >&2")
	check(t, err)
	both := slices.Concat(answer.Stdout, answer.Stderr)
	expect(t, len(both) <= 16<<20 && len(both) >= 15<<20 && answer.ExitCode == 0, "%d bytes, exit code %d", len(both), answer.ExitCode)
	same(t, "bytes of it", bytes.Count(both, []byte{0}), len(both))
}

func TestManyExecsThatWriteMuch(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	var many sync.WaitGroup // of commands that write so much; those of others are as they are
	for i := range 20 {
		many.Go(func() {
			answer, err := p.tryExec(id, 0, "sh", "-c", []string{"head -c 16000000 /dev/zero", "usleep 500000; head -c 10000 /dev/zero"}[i/16])
			expect(t, err == nil && len(answer.Stdout) >= 10000, "%d bytes, %v", len(answer.GetStdout()), err)
		})
	}
	many.Wait()
	peak := harness.ProcKiB(t, p.PID(), "VmHWM") >> 10
	expect(t, peak <= 350, "the daemon took %d MiB", peak)
}

// cri: ContainerStatus.state
func TestP58_TimeoutEndsTheCommandOnly(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	before := p.inCgroup(p.info(id).CgroupsPath + "*")
	_, err := p.tryExec(id, 1, "/bin/sh", "-c", "trap '' TERM; tail -f /dev/null & (tail -f /dev/null & tail -f /dev/null); sleep 1000")
	wantCode(t, err, codes.DeadlineExceeded)
	harness.Eventually(t, "the command's processes are gone", func() bool { return !slices.Contains(p.tree(id), "tail") })
	expect(t, p.status(id).State == running && len(before) != 0, "the container is %v", p.status(id))
	p.exec(id, "true")
}

// TestExecBesideTheEnd: a command that comes while the container ends is refused for that, or ends with it.
//
// attack: denial of service: the first process of a container ends while execs start
// held: only those execs fail, with that reason
func TestExecBesideTheEnd(t *testing.T) {
	p := newPod(t)
	const rounds, maxRounds, clients = 10, 200, 4
	refused, done := 0, 0
	for ; done < rounds || refused == 0 && done < maxRounds; done++ {
		id := p.run("app", "sleep 0.3")
		errs := make(chan error)
		for range clients {
			go func() {
				var err error
				for err == nil {
					err = p.execErr(id, "true")
				}
				errs <- err
			}()
		}
		for range clients {
			err := <-errs
			wantCode(t, err, codes.FailedPrecondition)
			if strings.Contains(err.Error(), "while the command was being started") {
				refused++
			}
		}
		check(t, p.remove(id))
	}
	t.Logf("%d of %d commands were being started when their container ended", refused, done*clients)
	expect(t, refused != 0, "no command has met the end of its container: this shows nothing")
}

func (p *pod) tree(id string) []string { return strings.Fields(p.exec(id, "ps -o comm")) }

func TestP36_BackgroundChildKeepsThePipe(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	same(t, "output", p.exec(id, "tail -f /dev/null & echo done"), "done")
	check(t, p.stop(id, 0))
}

// A container that was created has its namespaces, and takes commands before it
// is started, as runc's do: with both ways of exec.
func TestExecBeforeTheStart(t *testing.T) {
	p := newPod(t)
	id := p.create(shell("app", forever))
	same(t, "before the start", p.exec(id, `echo "$HOSTNAME"; echo made >/tmp/before`), "web")
	nodetest.Call(t, p.Runtime.Exec, &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"true"}, Stdout: true})
	same(t, "state after the exec", p.status(id).State, created)
	check(t, p.start(id))
	same(t, "after the start", p.exec(id, "cat /tmp/before"), "made")
	check(t, p.stop(id, 0))
	wantCode(t, p.execErr(id, "true"), codes.FailedPrecondition)
	never := p.create(shell("never", forever))
	go func() { _, _ = p.tryExec(never, 0, "sleep", "1000") }()
	cgroup := p.info(never).CgroupsPath
	harness.Eventually(t, "the exec runs", func() bool {
		return slices.Contains(append(p.inCgroup(cgroup), p.inCgroup(cgroup+"/minicri-exec-*")...), "sleep")
	})
	check(t, p.remove(never))
}

// A command that sleeps uninterruptibly past its time-out is given up, and reaped with its cgroup when it can end.
//
// attack: denial of service: the disk to which an exec writes hangs
// held: only the exec waits, until its time-out; it is reaped when it can end
func TestExecThatSleepsUninterruptibly(t *testing.T) {
	n := newNode(t)
	disk := t.TempDir()
	freeze := harness.Disk(t, disk)
	p := runPod(t, n, "web")
	id := p.run("app", forever, mounted(disk, "/disk"))
	thaw := freeze()
	cgroup := p.info(id).CgroupsPath
	// A busy machine may not have come to the write when the time is over.
	for seconds := int64(1); len(p.pidsInCgroup(cgroup+"/minicri-exec-*")) == 0; seconds *= 4 {
		_, err := p.tryExec(id, seconds, "/bin/sh", "-c", "echo x > /disk/file")
		wantCode(t, err, codes.DeadlineExceeded)
	}
	thaw()
	harness.Eventually(t, "the command is reaped", func() bool {
		return len(p.pidsInCgroup(cgroup+"/minicri-exec-*"))+zombies(n.Supervisors()) == 0
	})
	p.RemovePod(p.id) // before the disk goes
}

func zombies(parents []int) (count int) {
	for _, parent := range parents {
		for _, pid := range process.Children(strconv.Itoa(parent)) {
			if stat, err := process.ReadStat(pid); err == nil && stat.State == 'Z' {
				count++
			}
		}
	}
	return count
}

// While a container hangs in a mount all calls about others are answered, before it is given up.
//
// cri: ContainerConfig.mounts
//
// attack: denial of service: the server of a volume (FUSE) does not answer the mount
// held: only that container waits, until the limit of creations
func TestP41_DeadMountOfAnotherContainer(t *testing.T) {
	n := newNode(t, nodetest.Config("[limits]\ncreate = '1h'"))
	p, other := runPod(t, n, "hangs"), runPod(t, n, "other")
	witness, neighbour := other.run("witness", forever), p.run("neighbour", forever)
	config := shell("hangs", forever, mounted(filepath.Join(harness.DeadMount(t), "volume"), "/volume"))
	ctx, leave := context.WithCancel(t.Context())
	hangs := beside(func() error {
		_, err := p.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.id, Config: config, SandboxConfig: p.config})
		return err
	})
	for range 10 {
		other.list(nil)
		other.status(witness)
		other.address()
		other.exec(witness, "true")
		short := other.run("short", "true")
		check(t, other.stop(short, 0))
		check(t, other.remove(short))
		same(t, "exec in the same pod", p.exec(neighbour, "echo here"), "here")
		harness.Need(t, len(hangs) == 0, "it was given up, or the mount is not dead, when the others were answered")
	}
	leave()
	wantCode(t, <-hangs, codes.Canceled)
	reload(t, n, "[limits]\ncreate = '3s'\n")
	config.Metadata.Name = "limited"
	wantCode(t, p.createErr(config), codes.Unavailable, "/volume")
	reload(t, n, "[limits]\ncreate = '1h'\n")
	// It has left nothing behind: its name is free.
	config.Mounts = nil
	check(t, p.start(p.create(config)))
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
	n := newNode(t, nodetest.Config("[limits]\nkill = '2s'")) // also the time in which a supervisor has to answer
	p, together := runPod(t, n, "web"), runPod(t, n, "together", podPID(runtimeapi.NamespaceMode_POD))
	witness := p.run("witness", forever)
	const writes = "while true; do echo x >> /disk/file; sleep 0.01; done"
	const child = "(" + writes + ") & while true; do sleep 1; done"
	for name, c := range harness.Sorted(map[string]struct {
		pod    *pod
		config *runtimeapi.ContainerConfig
	}{
		"init":                    {p, shell("app", writes)},
		"child of init":           {p, shell("app", child)},
		"child that outlives all": {together, shell("app", child, pidMode(runtimeapi.NamespaceMode_POD, ""))},
	}) {
		t.Run(name, func(t *testing.T) {
			p, pod := c.pod, *p
			p.t, pod.t = t, t
			disk := t.TempDir()
			freeze := harness.Disk(t, disk)
			mounted(disk, "/disk")(c.config)
			id := p.create(c.config)
			check(t, p.start(id))
			cgroup := p.info(id).CgroupsPath
			thaw := freeze()
			harness.Eventually(t, "the container sleeps", func() bool { return p.sleepsUninterruptibly(cgroup) })
			for _, call := range []func() error{func() error { return p.stop(id, 0) }, func() error { return p.remove(id) }} {
				err := call()
				expect(t, err == nil || status.Code(err) == codes.Unavailable, "while it sleeps: %v", err)
			}
			harness.Need(t, p.sleepsUninterruptibly(cgroup), "the process does not sleep any more: this proves nothing")
			same(t, "containers listed while a process of it is there", len(p.list(&runtimeapi.ContainerFilter{Id: id})), 1)
			harness.Read(t, filepath.Join(p.State, "containers", id, "config.json")) // for poststop hooks, which come after the process
			same(t, "another container", pod.exec(witness, "echo here"), "here")
			thaw()
			harness.Eventually(t, "it is removed", func() bool { return p.remove(id) == nil })
			same(t, "left", p.pidsInCgroup(cgroup), nil)
			check(t, p.remove(p.create(c.config)))
		})
	}
	p.t, together.t = t, t
}
