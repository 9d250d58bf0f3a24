package hostile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moby/spdystream"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// killedCode is the exit code of a command that SIGKILL has ended.
const killedCode = 128 + int32(unix.SIGKILL)

var profiles = []runtimeapi.SecurityProfile_ProfileType{runtimeapi.SecurityProfile_Unconfined, runtimeapi.SecurityProfile_RuntimeDefault}

// newStopper runs a container that sends each process that comes into its pid namespace a signal.
func (p *tenant) newStopper(name string, signal unix.Signal, changes ...change) (id string) {
	id = p.run(name, append([]change{powerless(runtimeapi.SecurityProfile_Unconfined), ofAttacker("hit", strconv.Itoa(int(signal)))}, changes...)...)
	releaseStopped(p.t, p.facts(id).PID)
	return id
}

// outcomes counts how execs ended.
type outcomes struct {
	mu             sync.Mutex
	done, held     int // as if there were no attack; at their limit
	killed, failed int // by a signal; in a way that is none of these
}

// execs makes execs of true, some at a time, each of which has to end: with code 0, at its limit with an
// error that says so, or, where the attacker kills, killed.
func (p *tenant) execs(id string, count int, seconds int64, atOnce int, kills bool) *outcomes {
	p.t.Helper()
	o := &outcomes{}
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for i := 0; i < count/atOnce && !p.t.Failed(); i++ {
				p.timedExec(o, id, seconds, kills)
			}
		})
	}
	all.Wait()
	p.t.Logf("of %d execs %d were done, %d ended at their limit, %d were killed, %d failed otherwise", count, o.done, o.held, o.killed, o.failed)
	return o
}

func (p *tenant) timedExec(o *outcomes, id string, seconds int64, kills bool) {
	answer, err := p.exec(id, seconds, "true")
	limit := time.Duration(seconds) * time.Second
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case err == nil && answer.GetExitCode() == 0:
		o.done++
	case status.Code(err) == codes.DeadlineExceeded && strings.Contains(err.Error(), fmt.Sprintf("not done within %v", limit)):
		o.held++
	case kills && (err != nil || answer.GetExitCode() == killedCode):
		o.killed++
	default:
		o.failed++
		p.t.Errorf("an exec with a time-out of %v: %d, %v", limit, answer.GetExitCode(), err)
	}
}

// noLimit is a time-out of execs that none of them reaches, in seconds.
const noLimit = 100_000

// while makes execs, some at once and again and again, until do has returned. It does not wait for their end.
func (p *tenant) while(id string, atOnce int, do func()) (wait func()) {
	var execs sync.WaitGroup
	var over atomic.Bool
	for range atOnce {
		execs.Go(func() {
			for !over.Load() {
				_, _ = p.exec(id, noLimit, "true")
			}
		})
	}
	do()
	over.Store(true)
	return execs.Wait
}

// attack: denial of service: root in a container, all capabilities dropped, with and without seccomp, sends SIGSTOP or SIGKILL to the next pid in a loop during 20 execs
// held: only the exec waits, until its time-out; execs, starts, stops and logs of other pods are not delayed, the supervisor survives, and nothing of the execs remains
// field: runc, a process for each exec: the same
func TestStoppedExecsHoldUpNothingElse(t *testing.T) {
	for _, profile := range profiles {
		for _, signal := range []unix.Signal{unix.SIGSTOP, unix.SIGKILL} {
			t.Run(fmt.Sprint(profile, " ", signal), func(t *testing.T) {
				p := newTenant(t, newAttackedNode(t), "attacker")
				besides(t, p.Node, func(others func()) {
					id := p.newStopper("stopper", signal, powerless(profile))
					namespace := pidNamespaceOf(p.facts(id).PID)
					for o := (&outcomes{}); o.held+o.killed+o.failed == 0; { // the attacker has to be quick
						o = p.execs(id, 20, 2, 4, signal == unix.SIGKILL)
					}
					wait := p.while(id, 4, func() {
						if signal == unix.SIGSTOP {
							harness.Eventually(t, "an exec is stopped", func() bool { return len(stoppedIn(namespace)) > 0 })
						}
						others()
						harness.Want(t, signal != unix.SIGSTOP || len(stoppedIn(namespace)) > 0, "no exec is stopped any more: the others may have waited for it")
					})
					p.end(id)
					wait()
				})
			})
		}
	}
}

// end stops and removes a container, whatever its processes do.
func (p *tenant) end(id string) { check(p.t, errors.Join(p.stop(id), p.remove(id))) }

// limitCreation gives the creations and starts that begin later a short limit.
func limitCreation(t *testing.T, n *nodetest.Node) {
	n.Reload(func() {
		check(t, os.MkdirAll(filepath.Join(n.Dir, "config.toml.d"), 0o700))
		check(t, os.WriteFile(filepath.Join(n.Dir, "config.toml.d", "limit.toml"), []byte("[limits]\ncreate = '3s'\n"), 0o600))
	})
}

// attack: denial of service: root in a pod with one pid namespace, all capabilities dropped, sends SIGSTOP to each process that starts in the pod
// held: only that start waits, until the limit of starts; the pod can be removed, and others are not delayed
func TestStoppedStartsHoldUpNothingElse(t *testing.T) {
	n := newAttackedNode(t, nodetest.Config("[limits]\ncreate = '1h'"))
	shared := pidNamespace(runtimeapi.NamespaceMode_POD, "")
	besides(t, n, func(others func()) {
		p := newTenant(t, n, "attacker", func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
		})
		stopper := p.newStopper("stopper", unix.SIGSTOP, shared, outOfAppArmor)
		namespace := pidNamespaceOf(p.facts(stopper).PID)
		victims := 0
		victim := func() (ended chan error) { // that is stopped, or has ended
			victims++
			ended = make(chan error, 1)
			go func() {
				id, err := p.create(fmt.Sprint("victim", victims), shared)
				if err == nil {
					err = p.start(id)
				}
				ended <- err
			}()
			harness.Eventually(t, "it is stopped, or done", func() bool { return len(stoppedIn(namespace)) > 0 || len(ended) > 0 })
			return ended
		}
		ended := victim()
		for len(ended) > 0 { // the attacker has to be quick
			check(t, <-ended)
			ended = victim()
		}
		others()
		harness.Same(t, "victims that have ended", len(ended), 0)
		check(t, unix.Kill(p.facts(stopper).PID, unix.SIGKILL))
		for _, pid := range stoppedIn(namespace) {
			check(t, unix.Kill(pid, unix.SIGCONT))
		}
		check(t, <-ended)
		limitCreation(t, n)
		p.newStopper("another", unix.SIGSTOP, shared, outOfAppArmor)
		for err := error(nil); err == nil; {
			if err = <-victim(); err != nil {
				harness.WantError(t, err, "not done within 3s")
			}
		}
		p.RemovePod(p.id)
	})
}

// attack: denial of service: root of a user namespace sends SIGSTOP to execs, and the supervisor dies meanwhile
// held: the next supervisor serves, and nothing of the execs remains; the container keeps running
func TestStoppedExecsOfADeadSupervisor(t *testing.T) {
	p := newTenant(t, newAttackedNode(t), "attacker", nodetest.UserNamespace) // whose execs a starter makes
	id := p.newStopper("stopper", unix.SIGSTOP)
	namespace := pidNamespaceOf(p.facts(id).PID)
	for range 3 {
		var execs sync.WaitGroup
		var over atomic.Bool
		for range 3 {
			execs.Go(func() {
				for !over.Load() { // the first may be done, or come before the supervisor knows the container
					_, _ = p.exec(id, 100, "true")
				}
			})
		}
		harness.Eventually(t, "an exec is stopped", func() bool { return len(stoppedIn(namespace)) > 0 })
		over.Store(true)
		killed := p.Supervisors()
		check(t, unix.Kill(killed[0], unix.SIGKILL))
		execs.Wait()
		harness.Eventually(t, "another serves", func() bool {
			pids := p.Supervisors()
			return len(pids) == 1 && pids[0] != killed[0]
		})
	}
	// The cgroups of execs stay for the next ones. The end of the node finds what outlives the container.
	harness.Eventually(t, "no exec is left", func() bool { return len(stoppedIn(namespace)) == 0 })
	p.end(id)
}

// attack: denial of service: a container sends SIGSTOP to the exec of its PostStart hook and to probes, and is removed meanwhile
// held: only the exec waits, until its time-out; the probes end with the container, and the removal is not delayed
func TestRemovalBesideStoppedExecs(t *testing.T) {
	p := newTenant(t, newAttackedNode(t), "attacker")
	besides(t, p.Node, func(others func()) {
		for i := range 5 {
			id := p.newStopper(fmt.Sprint("stopper", i), unix.SIGSTOP)
			p.execs(id, 1, 2, 1, false)
			namespace := pidNamespaceOf(p.facts(id).PID)
			wait := p.while(id, 3, func() {
				harness.Eventually(t, "a probe is stopped", func() bool { return len(stoppedIn(namespace)) > 0 })
				if i == 0 {
					others()
				}
			})
			p.end(id)
			wait() // without the removal a stopped probe would never end
		}
	})
}

// limit writes to a file of a container's cgroup, and reports whether the machine has such a file.
func (p *tenant) limit(id, file, value string) bool {
	hierarchies, err := cgroup.FindHierarchies()
	check(p.t, err)
	for _, hierarchy := range hierarchies {
		path := filepath.Join(hierarchy, p.facts(id).CgroupsPath, file)
		if _, err := os.Stat(path); err == nil {
			check(p.t, os.WriteFile(path, []byte(value), 0))
			return true
		}
	}
	return false
}

// attack: denial of service: a container is frozen, and gets 20 execs
// held: each exec is refused with that reason (cgroup v2 beside v1: ends at its time-out); after the thaw execs run
// field: runc and crun: the same
func TestExecsOfAFrozenContainer(t *testing.T) {
	for _, freezer := range []struct{ file, freeze, thaw string }{{"cgroup.freeze", "1", "0"}, {"freezer.state", "FROZEN", "THAWED"}} {
		t.Run(freezer.file, func(t *testing.T) {
			p := newTenant(t, newAttackedNode(t), "frozen")
			if !p.limit(p.run("trial"), freezer.file, freezer.thaw) {
				t.Skipf("no %s for containers: the machine has cgroups of the other version", freezer.file)
			}
			besides(t, p.Node, func(others func()) {
				id := p.run("app")
				p.limit(id, freezer.file, freezer.freeze)
				for i := 0; i < 20 && !t.Failed(); i++ {
					_, err := p.exec(id, 2, "true")
					if freezer.file == "cgroup.freeze" && !cgroup.Unified() && status.Code(err) == codes.DeadlineExceeded {
						break // of all that come, each does
					}
					harness.WantError(t, err, "frozen")
				}
				others()
				p.limit(id, freezer.file, freezer.thaw)
				p.execs(id, 2, 30, 1, false)
				p.limit(id, freezer.file, freezer.freeze)
				p.end(id)
			})
		})
	}
}

// attack: denial of service: the cgroup of a pod is frozen while a container is created in it, and the pod is removed
// held: the creation waits until its limit, the removal until the thaw on cgroup v1, because frozen processes cannot be killed there; nothing remains
func TestCreationInAFrozenPod(t *testing.T) {
	n := newAttackedNode(t, nodetest.Config("[limits]\ncreate = '1h'"))
	parent := n.MakeCgroup("frozen")
	besides(t, n, func(others func()) {
		p := newTenant(t, n, "frozen", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = parent })
		id := p.run("app")
		freezer, freeze, thaw := "../freezer.state", "FROZEN", "THAWED"
		if !p.limit(id, freezer, thaw) {
			freezer, freeze, thaw = "../cgroup.freeze", "1", "0"
		}
		p.limit(id, freezer, freeze)
		second := make(chan error, 1)
		go func() {
			_, err := p.create("second")
			second <- err
		}()
		others()
		harness.Same(t, "creations that have ended", len(second), 0)
		p.limit(id, freezer, thaw)
		check(t, <-second)
		p.limit(id, freezer, freeze)
		limitCreation(t, n)
		_, err := p.create("third")
		harness.WantError(t, err, "not done within 3s")
		err = nodetest.Err(t, n.Runtime.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
		harness.Want(t, err == nil || !cgroup.Unified(), "what is frozen by cgroup v2 is not killed: %v", err)
		p.limit(id, freezer, thaw)
		p.RemovePod(p.id)
	})
}

// attack: denial of service: a container is at cpu.max (1 ms per second for 300 busy processes), memory.high or pids.max, and gets 20 execs
// held: only the exec waits, until its time-out
func TestExecsOfAContainerThatCannotRun(t *testing.T) {
	for name, c := range harness.Sorted(map[string]struct {
		quota   int64 // of its CPU at first, in microseconds of a second
		script  string
		is      string      // how the command lines of its processes begin; of one that runs dd it is the shell's, of busybox
		count   int         // of them
		limits  [][3]string // file, limit, what was before; the first that there is
		mayFail bool
	}{
		"cpu.max":     {500_000, "for i in $(seq 300); do { sleep 30; while :; do :; done; } & done; wait", "/bin/sh -c for i in ", 301, [][3]string{{"cpu.max", "1000 1000000", "500000 1000000"}, {"cpu.cfs_quota_us", "1000", "500000"}}, false},
		"memory.high": {0, "dd if=/dev/zero of=/dev/null bs=64M", "/bin/sh -c dd if=", 1, [][3]string{{"memory.high", "4194304", "max"}}, false},
		"pids.max":    {0, "sleep 7771", "sleep 7771", 1, [][3]string{{"pids.max", "1", "max"}}, true},
	}) {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t, newAttackedNode(t), "limited")
			trial := p.run("trial")
			i := slices.IndexFunc(c.limits, func(l [3]string) bool { return p.limit(trial, l[0], l[2]) })
			if i < 0 {
				t.Skipf("no %s for containers: the machine has cgroup v1", name)
			}
			besides(t, p.Node, func(others func()) {
				quota := c.quota
				id := p.run("app", command("/bin/sh", "-c", c.script), func(c *runtimeapi.ContainerConfig) {
					c.Linux.Resources.CpuPeriod, c.Linux.Resources.CpuQuota = 1_000_000, quota
				})
				harness.Eventually(t, "all of it runs", func() bool {
					running, asleep := 0, false
					for _, one := range harness.Processes() {
						line := strings.Join(one.Args, " ")
						asleep = asleep || line == "sleep 30"
						if strings.HasPrefix(line, c.is) {
							running++
						}
					}
					return running >= c.count && !asleep
				})
				p.limit(id, c.limits[i][0], c.limits[i][1])
				p.execs(id, 8, 2, 4, c.mayFail)
				wait := p.while(id, 4, others)
				p.limit(id, c.limits[i][0], c.limits[i][2]) // what is killed has to run to its end
				p.end(id)
				wait()
			})
		})
	}
}

// attack: denial of service: a container is killed for its memory, with its whole cgroup (memory.oom.group), and gets execs meanwhile
// held: only the container and its execs end
func TestExecsOfAContainerThatIsKilledForItsMemory(t *testing.T) {
	p := newTenant(t, newAttackedNode(t), "eater")
	besides(t, p.Node, func(others func()) {
		for i := range 10 {
			id, err := p.create(fmt.Sprint("eater", i), command("/bin/sh", "-c", "sleep 0.3; exec tail /dev/zero"), func(c *runtimeapi.ContainerConfig) {
				c.Linux.Resources.MemoryLimitInBytes = 16 << 20
				if cgroup.Unified() { // as a kubelet has it there
					c.Linux.Resources.Unified = map[string]string{"memory.oom.group": "1"}
				}
			})
			check(t, err)
			check(t, p.start(id))
			wait := p.while(id, 4, func() {
				if i == 0 {
					others()
				}
				harness.Eventually(t, "it is killed for its memory", func() bool {
					return nodetest.Call(t, p.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: id}).GetStatus().GetReason() == "OOMKilled"
				})
			})
			wait()
			p.end(id)
		}
	})
}

// attack: denial of service: a container has a lease on its /etc/passwd (F_SETLEASE), so that every open waits, or makes it a fifo without a writer
// held: only the exec waits, until its time-out
func TestExecsBesideAPasswdThatHangs(t *testing.T) {
	for name, c := range harness.Sorted(map[string]struct {
		container change
		is        string
	}{
		"lease": {ofAttacker("lease", "/etc/passwd"), "lease 0"},
		"fifo":  {command("/bin/sh", "-c", "rm /etc/passwd && mknod /etc/passwd p && echo made && sleep 1000000"), "made"},
	}) {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t, newAttackedNode(t), "passwd")
			besides(t, p.Node, func(others func()) {
				id := p.run("app", c.container)
				p.awaitLog("app", c.is)
				pids := p.Supervisors()
				before := held(t, pids)
				p.execs(id, 8, 2, 4, true)
				wantNothingLeft(t, p.Node, pids, before)
				wait := p.while(id, 4, others)
				p.end(id)
				wait()
			})
		})
	}
}

// attack: denial of service: nobody reads the terminals and pipes of ten execs, and the execs do not read their input
// held: only the exec waits; streams and logs of others continue
func TestUnreadStreamsHoldUpNothingElse(t *testing.T) {
	p := newTenant(t, newAttackedNode(t), "unread")
	besides(t, p.Node, func(others func()) {
		id := p.run("app")
		streams := target{p, id}
		for i := range 10 {
			request := &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"cat", "/dev/zero"}, Stdin: true, Stdout: true, Tty: i%2 == 0, Stderr: i%2 == 1}
			raw := streams.upgradeRaw(nodetest.Call(t, p.Runtime.Exec, request).GetUrl(), "v4.channel.k8s.io")
			defer raw.Close()                                 // a client holds its own session up
			conn, err := spdystream.NewConnection(raw, false) // which is never served: nothing is read
			check(t, err)
			c := spdyClient{conn, raw}
			last := map[bool]string{false: "stderr", true: "resize"}[request.Tty]
			for _, kind := range []string{"error", "stdin", "stdout", last} {
				c.open(t, kind, 0, 0)
			}
			_, err = raw.Write(append(dataFrame(3, 60<<10), make([]byte, 60<<10)...)) // of its stdin, which cat does not read
			check(t, err)
		}
		harness.Eventually(t, "ten of cat wait for their reader", func() bool {
			waiting := 0
			for _, one := range harness.Processes() {
				if one.Args[0] == "cat" && one.State == 'S' {
					waiting++
				}
			}
			return waiting == 10
		})
		others()
		p.execs(id, 8, 10, 2, false)
		p.end(id)
	})
}

// attack: denial of service: a program has the name of a program of the runtime, also in /proc/self/comm, and exits with 7
// held: it starts and its exit code is 7, and so does an exec
func TestProgramsThatAreCalledAsOurs(t *testing.T) {
	n := nodetest.New(t)
	names := []string{"minicri-launch", "minicri-shim", "runc:[2:INIT]"}
	n.BuildImage(attackerImage, nodetest.Object{"Env": []string{"PATH=/bin"}}, n.AddBusybox, func(l *nodetest.Layer) {
		for _, name := range names {
			l.File(name, 0o755, 0, "#!/bin/sh\nsleep 1; exit 7\n")
		}
	})
	p := newTenant(t, n, "names")
	for i, name := range names {
		for way, words := range harness.Sorted(map[string][]string{"called": {"/" + name}, "comm": {"/bin/sh", "-c", "printf '" + name + "' >/proc/self/comm; exit 7"}}) {
			container := fmt.Sprint(way, i)
			id, err := p.create(container, func(c *runtimeapi.ContainerConfig) { c.Image.Image, c.Command = attackerImage, words })
			check(t, err)
			check(t, p.start(id))
			var end *runtimeapi.ContainerStatus
			harness.Eventually(t, name+" ends", func() bool {
				answer := nodetest.Call(t, n.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: id})
				end = answer.GetStatus()
				return end.GetState() == runtimeapi.ContainerState_CONTAINER_EXITED
			})
			harness.Want(t, end.GetExitCode() == 7 && end.GetReason() == "Error" && end.GetMessage() == "",
				"%s (%s): %d, %s: %s", name, way, end.GetExitCode(), end.GetReason(), end.GetMessage())
			witness := p.run("witness-"+container, func(c *runtimeapi.ContainerConfig) { c.Image.Image = attackerImage })
			answer, err := p.exec(witness, 30, words...)
			harness.Want(t, err == nil && answer.GetExitCode() == 7, "an exec of %s (%s): %d, %v", name, way, answer.GetExitCode(), err)
		}
	}
}
