package hostile

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const (
	// late is how much later than its limit a call may end on a busy machine.
	late = 8 * time.Second
	// killedCode is the exit code of a command that SIGKILL has ended.
	killedCode = 128 + int32(unix.SIGKILL)
	// enough failures tell what there is to tell.
	enough = 3
)

var profiles = []runtimeapi.SecurityProfile_ProfileType{runtimeapi.SecurityProfile_Unconfined, runtimeapi.SecurityProfile_RuntimeDefault}

// newStopper runs a container that sends each process that comes into its pid namespace
// a signal.
func (p *tenant) newStopper(name string, signal unix.Signal, changes ...change) (id string) {
	p.t.Helper()
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

// execs makes execs of true, some at a time, each of which has to end: with code 0, at
// its limit with an error that says so, or, where the attacker kills, killed.
func (p *tenant) execs(id string, count int, seconds int64, atOnce int, kills bool) *outcomes {
	p.t.Helper()
	o := &outcomes{}
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for range count / atOnce {
				if o.failures() < enough {
					p.timedExec(o, id, seconds, kills)
				}
			}
		})
	}
	all.Wait()
	p.t.Logf("of %d execs %d were done, %d ended at their limit, %d were killed, %d failed otherwise", count, o.done, o.held, o.killed, o.failed)
	return o
}

func (o *outcomes) failures() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.failed
}

func (p *tenant) timedExec(o *outcomes, id string, seconds int64, kills bool) {
	began := time.Now()
	answer, err := p.exec(id, seconds, "true")
	took, limit := time.Since(began), time.Duration(seconds)*time.Second
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case took > limit+late:
		o.failed++
		p.t.Errorf("an exec with a time-out of %v ended after %v: %d, %v", limit, took, answer.GetExitCode(), err)
	case err == nil && answer.GetExitCode() == 0:
		o.done++
	case status.Code(err) == codes.DeadlineExceeded && strings.Contains(err.Error(), fmt.Sprintf("not done within %v", limit)):
		o.held++
	case kills && (err != nil || answer.GetExitCode() == killedCode):
		o.killed++
	default:
		o.failed++
		p.t.Errorf("an exec with a time-out of %v, after %v: %d, %v", limit, took, answer.GetExitCode(), err)
	}
}

// attack: what a container can stop: by signals: root in it, all capabilities dropped, with and without the default filter of system calls, sends SIGSTOP or SIGKILL to the next pid in a loop while 20 execs come
// held: that exec, until its time-out; execs, starts, stops and logs of other pods take no longer, the supervisor lives, nothing of the execs is left
// field: runc, a process for each exec: the same
func TestStoppedExecsHoldUpNothingElse(t *testing.T) {
	for _, profile := range profiles {
		for _, signal := range []unix.Signal{unix.SIGSTOP, unix.SIGKILL} {
			t.Run(fmt.Sprint(profile, " ", signal), func(t *testing.T) {
				n := newAttackedNode(t)
				p := newTenant(t, n, "attacker")
				id := p.newStopper("stopper", signal, powerless(profile))
				besides(t, n, func() {
					o := p.execs(id, 20, 2, 4, signal == unix.SIGKILL)
					if o.held+o.killed+o.failed == 0 {
						t.Error("the attacker has met no exec: this shows nothing")
					}
				})
			})
		}
	}
}

// inTime fails the test if a call fails, or takes longer than a busy machine does.
func (p *tenant) inTime(what string, call func() error) {
	p.t.Helper()
	began := time.Now()
	if err := call(); err != nil || time.Since(began) > 2*late {
		p.t.Errorf("%s took %v: %v", what, time.Since(began), err)
	}
}

// end stops and removes a container, whatever its processes do.
func (p *tenant) end(id string) {
	p.t.Helper()
	p.inTime("the removal", func() error { return errors.Join(p.stop(id), p.remove(id)) })
}

// attack: what a container can stop: by SIGSTOP: root in a container of a pod with one pid namespace, all capabilities dropped, stops whatever is started in that pod
// held: the start of that container, until the limit of starts; the pod is removed, others take no longer
func TestStoppedStartsHoldUpNothingElse(t *testing.T) {
	n := newAttackedNode(t, harness.Config("[limits]\ncreate = '5s'"))
	shared := pidNamespace(runtimeapi.NamespaceMode_POD, "")
	besides(t, n, func() {
		p := newTenant(t, n, "attacker", func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
		})
		p.newStopper("stopper", unix.SIGSTOP, shared)
		stopped := 0
		for i := range 4 {
			began := time.Now()
			id, err := p.create(fmt.Sprint("victim", i), shared)
			if err == nil {
				err = p.start(id)
			}
			if err != nil {
				stopped++
			}
			if took := time.Since(began); took > 2*5*time.Second+late {
				t.Errorf("a start that is stopped ended after %v: %v", took, err)
			}
			if id != "" {
				p.end(id)
			}
		}
		if stopped == 0 {
			t.Error("the attacker has stopped no start: this shows nothing")
		}
		p.inTime("the removal of the pod", func() error { p.RemovePod(p.id); return nil })
	})
}

// attack: what a container can stop: by SIGSTOP: a container stops the exec that comes as soon as it runs, as that of a PostStart hook does, and then probes, which are under way when it is removed
// held: the exec, until its time-out; the probes end with the container, the removal takes no longer
func TestRemovalBesideStoppedExecs(t *testing.T) {
	n := newAttackedNode(t)
	p := newTenant(t, n, "attacker")
	besides(t, n, func() {
		for i := range 5 {
			id := p.newStopper(fmt.Sprint("stopper", i), unix.SIGSTOP)
			p.execs(id, 1, 2, 1, false)
			var probes sync.WaitGroup
			var ended atomic.Int32
			const count = 3
			for range count {
				probes.Go(func() {
					began := time.Now()
					defer ended.Add(1)
					if _, err := p.exec(id, 50, "true"); time.Since(began) > 30*time.Second {
						t.Errorf("a probe of a container that was removed ended after %v: %v", time.Since(began), err)
					}
				})
			}
			namespace := pidNamespaceOf(p.facts(id).PID)
			harness.Eventually(t, "the probes are stopped", patience, func() bool { return len(stoppedIn(namespace))+int(ended.Load()) >= count })
			p.end(id)
			probes.Wait()
		}
	})
}
