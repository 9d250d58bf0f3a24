package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// frozenLimits: the calls that wait for a plugin end with its limit, and not with
// those of the calls.
const frozenLimits = fast + `run = "5m"
destroy = "5m"
detach_tries = 1000
detach_time = "1h"
cni_add = "8s"
cni_del = "8s"
cni_gc = "8s"
cni_status = "8s"
gc_period = "200ms"
`

// frozenNode is a node whose second plugin can be frozen in a verb.
type frozenNode struct {
	*harness.Node
	*recorder
	t    *testing.T
	verb string
}

// A plugin that is frozen with all its processes, in whatever verb, cannot be killed.
// Its call ends at its limit, it is shown, also by the next daemon, and it holds up
// nothing else; when it is thawed it ends, and what waited for that is done.
func TestFrozenPlugin(t *testing.T) {
	for _, verb := range []string{"ADD", "DEL", "GC", "STATUS"} {
		t.Run(verb, func(t *testing.T) {
			n := newFrozenNode(t, verb)
			other := n.RunPod(n.PodConfig("other"))
			victim, call := n.hang()
			thaw := freezeAll(t, n.hung())
			n.order("two", verb, "")
			n.wantFailed(call)
			n.wantShown()
			n.wantOthersServed(other)

			n.Stop()
			n.Start()
			n.wantShown()
			n.Kill()
			n.Start()
			n.wantShown()
			n.wantOthersServed(n.RunPod(n.PodConfig("other")))

			thaw()
			eventually(t, "nothing is stuck", patience, func() bool { return len(n.stuck()) == 0 })
			n.wantUndone(victim)
		})
	}
}

// One that is stopped (SIGSTOP) with all its processes is killed at its limit.
func TestStoppedPlugin(t *testing.T) {
	for _, verb := range []string{"ADD", "DEL", "GC", "STATUS"} {
		t.Run(verb, func(t *testing.T) {
			n := newFrozenNode(t, verb)
			other := n.RunPod(n.PodConfig("other"))
			victim, call := n.hang()
			pids := n.hung()
			for _, pid := range pids {
				check(t, unix.Kill(pid, unix.SIGSTOP))
			}
			n.order("two", verb, "")
			if call != nil {
				if err := <-call; err == nil || !strings.Contains(err.Error(), "not done after 8s") {
					t.Errorf("%s: %v", verb, err)
				}
			}
			for _, pid := range pids {
				eventually(t, "the plugin is gone", patience, func() bool { return !alive(pid) })
			}
			n.wantOthersServed(other)
			n.wantUndone(victim)
			eventually(t, "nothing is stuck", patience, func() bool { return len(n.stuck()) == 0 })
		})
	}
}

func newFrozenNode(t *testing.T, verb string) *frozenNode {
	t.Helper()
	node := newNode(t, harness.NoNetwork(), harness.Config(frozenLimits))
	n := &frozenNode{Node: node, recorder: newRecorder(t, node), t: t, verb: verb}
	n.WriteConflist("10-test.conflist", n.bridge("one"), n.plugin("two", nil))
	return n
}

// hang has the verb hang: in a call for a pod, whose error comes then, or in one that
// the daemon makes by itself.
func (n *frozenNode) hang() (victim string, call chan error) {
	n.t.Helper()
	if n.verb == "DEL" {
		victim = n.RunPod(n.PodConfig("victim"))
	}
	n.order("two", n.verb, "hang")
	if n.verb != "ADD" && n.verb != "DEL" {
		return "", nil
	}
	call = make(chan error, 1)
	go func() {
		if n.verb == "DEL" {
			call <- stop(n.t, n.Node, victim)
			return
		}
		_, err := run(n.t, n.Node, n.PodConfig("victim"))
		call <- err
	}()
	return victim, call
}

func (n *frozenNode) wantFailed(call chan error) {
	n.t.Helper()
	if call == nil {
		return
	}
	err := <-call
	for _, text := range []string{"CNI " + n.verb, "not done after 8s", "do not end"} {
		if err == nil || !strings.Contains(err.Error(), text) {
			n.t.Errorf("the error does not say %q: %v", text, err)
		}
	}
}

// stuckRun is what crictl info says of one.
type stuckRun struct {
	Verb      string
	Processes []int
}

func (n *frozenNode) stuck() []stuckRun {
	n.t.Helper()
	return harness.Info[[]stuckRun](n.t, n.Node, "stuckPlugins")
}

func (n *frozenNode) wantShown() {
	n.t.Helper()
	eventually(n.t, "it is shown", patience, func() bool {
		stuck := n.stuck()
		return len(stuck) == 1 && stuck[0].Verb == n.verb && len(stuck[0].Processes) >= 2
	})
}

// wantOthersServed removes a pod that runs, has another one live, and looks that GC and
// STATUS, if it is not they that hang, are asked.
func (n *frozenNode) wantOthersServed(id string) {
	n.t.Helper()
	check(n.t, stop(n.t, n.Node, id))
	check(n.t, remove(n.t, n.Node, id))
	n.RemovePod(n.RunPod(n.PodConfig("third")))
	n.forget()
	for _, verb := range []string{"GC", "STATUS"} {
		if verb != n.verb {
			eventually(n.t, verb+" runs", patience, func() bool { return len(n.calls(verb)) > 0 })
		}
	}
	eventually(n.t, "the network's readiness", patience, func() bool {
		ready, message := networkReady(n.t, n.Node)
		return ready || n.verb == "STATUS" && strings.Contains(message, "do not end")
	})
}

// wantUndone: the pod of the call that failed can be removed, or be made again, and no
// address is lost.
func (n *frozenNode) wantUndone(victim string) {
	n.t.Helper()
	if victim == "" {
		eventually(n.t, "the pod can be made", patience, func() (made bool) {
			var err error
			victim, err = run(n.t, n.Node, n.PodConfig("victim"))
			return err == nil
		})
	}
	check(n.t, stop(n.t, n.Node, victim))
	check(n.t, remove(n.t, n.Node, victim))
	eventually(n.t, "every address is free", patience, func() bool { return len(addresses(n.t, n.Node)) == 0 })
}

// freezeAll freezes processes, as those that wait for a dead disk are: SIGKILL does not
// end them before they are thawed. It needs the freezer of cgroup v1: that of version 2
// lets what is killed end.
func freezeAll(t *testing.T, pids []int) (thaw func()) {
	t.Helper()
	const freezer = "/sys/fs/cgroup/freezer"
	if _, err := os.Stat(freezer); err != nil {
		t.Skip("needs the freezer of cgroup v1, which this machine does not have:", err)
	}
	dir := filepath.Join(freezer, fmt.Sprintf("minicri-e2e-freeze-%d-%d", os.Getpid(), pids[0]))
	check(t, os.Mkdir(dir, 0o755))
	state := filepath.Join(dir, "freezer.state")
	thaw = func() { check(t, os.WriteFile(state, []byte("THAWED"), 0)) }
	t.Cleanup(func() {
		thaw()
		eventually(t, "the freezer is empty", patience, func() bool { return os.Remove(dir) == nil }) // they were killed
	})
	for _, pid := range pids {
		check(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0))
	}
	check(t, os.WriteFile(state, []byte("FROZEN"), 0))
	eventually(t, "the processes are frozen", patience, func() bool {
		now, err := os.ReadFile(state)
		check(t, err)
		return strings.TrimSpace(string(now)) == "FROZEN"
	})
	return thaw
}
