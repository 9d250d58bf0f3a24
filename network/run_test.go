package network

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// swallowed are texts of errors that go-cni takes for success.
var swallowed = []string{
	`clusterinformations.crd.projectcalico.org \"default\" not found`, "endpoint of this container not found",
	"dial unix /run/agent/agent.sock: connect: no such file or directory",
}

// A DEL that fails has failed, whatever its text, with a namespace and without.
func TestDELThatFailsHasFailedWhateverItSays(t *testing.T) {
	for _, text := range swallowed {
		for _, path := range []string{"alive", ""} {
			n := newScripted(t, nil)
			n.attached(t, "web")
			put(t, filepath.Join(n.scripted, "DEL.fail"), text)
			if path != "" {
				path = n.NamespacePath("web")
			}
			harness.WantError(t, n.Detach(t.Context(), "web", path), "CNI DEL", "plugin scripted", strings.ReplaceAll(text, `\`, ""), "CNI error code 11", "try 1")
			harness.Want(t, n.find("web") != nil && len(n.Pending()) == 1, "%q: the attachment is gone after a DEL that failed", text)
			n.untell(t, "DEL.fail")
			n.detach(t, "web")
		}
	}
}

// chain is bridge with host-local, and then the plugin "scripted".
func (n *node) chain(t *testing.T) []map[string]any {
	return []map[string]any{
		{"type": "bridge", "bridge": "br-chain", "ipam": map[string]any{
			"type": "host-local", "dataDir": filepath.Join(n.scripted, "ipam"),
			"ranges": []any{[]any{map[string]string{"subnet": "10.97.0.0/24"}}},
		}},
		n.script(),
	}
}

// helper waits for the child that the plugin has left behind.
func (n *node) helper(t *testing.T) (pid int) {
	harness.Eventually(t, "the helper runs", func() bool {
		data, _ := os.ReadFile(filepath.Join(n.scripted, "helper"))
		pid, _ = strconv.Atoi(strings.TrimSpace(string(data)))
		return pid > 0
	})
	return pid
}

func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// What a plugin leaves running for its pod is left alone: by Attach, which does
// not wait for it, by the next daemon, by CHECK that fails, by DEL.
func TestHelperOfAPluginLives(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.Check = time.Second })
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.helper")
	n.attach(t, "web")
	helper := n.helper(t)
	t.Cleanup(func() { _ = unix.Kill(helper, unix.SIGKILL) })
	n.reopen(t)
	n.runs(t)
	n.tell(t, "CHECK.hang")
	n.RequestCheck()
	harness.Eventually(t, "CHECK is ended", func() bool { return len(n.Drifted()) == 1 })
	n.detach(t, "web")
	harness.Want(t, alive(helper), "the helper was ended, or DEL has waited for its end")
	must(t, unix.Kill(helper, unix.SIGKILL))
	harness.Eventually(t, "the run of the helper is removed", func() bool { return len(n.runDirs(t)) == 0 })
}

// runDirs are the cgroups of runs.
func (n *node) runDirs(t *testing.T) []string {
	parent, err := cgroup.GroupParent(n.Options.CgroupParent)
	must(t, err)
	return harness.Glob(t, parent.Dir, n.Options.Mark+"*")
}

// A network before CNI 0.4.0, as flannel's manifests have it, has no CHECK: nothing is noted of it.
func TestCheckOfAnOldNetworkNotesNothing(t *testing.T) {
	n := newNode(t, nil)
	put(t, filepath.Join(n.ConfDir, "10.conflist"), marshal(t, map[string]any{"cniVersion": "0.3.1", "name": "net", "plugins": n.chain(t)[:1]}))
	n.attached(t, "web")
	n.check("web")
	harness.Same(t, "drifted", n.Drifted(), nil)
	n.detach(t, "web")
}

// statusLimit is the limit of a STATUS that hangs.
const statusLimit = 500 * time.Millisecond

func (n *node) limitStatus(t *testing.T, limit time.Duration) {
	limits := n.Options.Limits
	limits.Status = limit
	n.SetLimits(limits)
}

// A daemon that ends while plugins are asked for STATUS, or collect, leaves nothing of
// that to the next one: Close waits until it is killed and removed.
func TestCloseInsideARunOfTheNetwork(t *testing.T) {
	for _, verb := range []string{"STATUS", "GC"} {
		n := newNode(t, func(o *Options) { o.Limits.GCPeriod = often })
		n.tell(t, verb+".hang")
		n.configure(t, "10.conflist", "net", n.script())
		n.reopen(t)
		n.runs(t)
		harness.Eventually(t, verb+" hangs", func() bool { return len(processesWith(t, mark(), "CNI_COMMAND="+verb)) > 0 })
		n.Close()
		harness.Same(t, "left of "+verb, n.runDirs(t), nil)
	}
}

// Before CNI 1.1 there is no STATUS; that the programs are there has to do.
func TestStatusOfOlderNetworks(t *testing.T) {
	n := newNode(t, nil)
	n.tell(t, "STATUS.fail")
	old := marshal(t, map[string]any{"cniVersion": "1.0.0", "name": "old", "plugins": []any{n.script()}})
	put(t, n.ConfDir+"/10.conflist", old)
	n.reopen(t)
	n.refreshStatus()
	harness.Check(t, n.ready(t))
	harness.Same(t, "asked all the same", n.calls(t, "STATUS"), nil)
	put(t, n.ConfDir+"/10.conflist", strings.ReplaceAll(old, "scripted", "missing"))
	n.reopen(t)
	n.refreshStatus()
	harness.WantError(t, n.ready(t), "missing", "install the plugin")
}

// After a start there is no verdict before the plugins have answered, however long they take within the limit.
func TestNoVerdictBeforeTheFirstAnswer(t *testing.T) {
	n := newScripted(t, nil)
	n.reopen(t)
	left, cancel := context.WithCancel(t.Context())
	cancel()
	harness.WantError(t, n.Ready(left), "not answered STATUS yet")
	n.runs(t)
	harness.Check(t, n.ready(t))
}

// One answer that does not come in time says nothing; the second one does.
func TestOneSlowStatusIsNoVerdict(t *testing.T) {
	n := newScripted(t, nil)
	n.reopen(t)
	n.refreshStatus()
	n.limitStatus(t, statusLimit)
	n.tell(t, "STATUS.hang")
	n.refreshStatus()
	harness.Check(t, n.ready(t))
	n.refreshStatus()
	harness.WantError(t, n.ready(t), "not done after 500ms")
	n.untell(t, "STATUS.hang")
	n.limitStatus(t, within)
	n.refreshStatus()
	harness.Check(t, n.ready(t))
}

const often = 200 * time.Millisecond

// GC gives the plugins of each network the attachments that are valid: all that
// the journal has of this network, no other's, and those that it has lost.
func TestGCNamesTheValidAttachments(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.GCPeriod = often })
	n.configure(t, "10.conflist", "before", n.script())
	n.journalled(t, "old", nil)
	n.configure(t, "10.conflist", "now", n.script(), map[string]any{"type": "tuning"})
	n.Reload()
	for _, id := range []string{"web", "db"} {
		n.journalled(t, id, nil)
	}
	n.KnowAttached("lost")
	n.runs(t)
	seen := make(map[string]string)
	harness.Eventually(t, "both networks are collected", func() bool {
		if len(n.calls(t, "GC")) == 0 {
			return false
		}
		var stdin struct {
			Name  string
			Valid []types.GCAttachment `json:"cni.dev/valid-attachments"`
		}
		data, err := os.ReadFile(filepath.Join(n.scripted, "GC.stdin"))
		if err != nil || json.Unmarshal(data, &stdin) != nil {
			return false // it is being written, by both
		}
		var ids []string
		for _, valid := range stdin.Valid {
			ids = append(ids, valid.ContainerID+"/"+valid.IfName)
		}
		slices.Sort(ids)
		seen[stdin.Name] = strings.Join(ids, " ")
		return len(seen) == 2
	})
	harness.Same(t, "valid attachments", seen, map[string]string{"before": "lost/eth0 old/eth0", "now": "db/eth0 lost/eth0 web/eth0"})
	harness.Same(t, "GC ran DEL", n.calls(t, "DEL"), nil)
}

func TestGCCanBeTurnedOff(t *testing.T) {
	for name, configure := range map[string]func(*testing.T, *node){
		"by the network": func(t *testing.T, n *node) {
			list := map[string]any{"cniVersion": "1.1.0", "name": "net", "disableGC": true, "plugins": []any{n.script()}}
			put(t, n.ConfDir+"/10.conflist", marshal(t, list))
		},
		"by its age": func(t *testing.T, n *node) {
			list := map[string]any{"cniVersion": "1.0.0", "name": "net", "plugins": []any{n.script()}}
			put(t, n.ConfDir+"/10.conflist", marshal(t, list))
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, nil)
			configure(t, n)
			n.Reload()
			for _, c := range n.networksInUse() {
				n.collect(t.Context(), c)
			}
			harness.Same(t, "collected", n.calls(t, "GC"), nil)
		})
	}
	synctest.Test(t, func(t *testing.T) { // by the node
		n, ended := &CNI{base: t.Context()}, false
		n.SetLimits(Limits{})
		wake := make(chan struct{}, 1)
		go func() {
			n.awaitPeriod(n.base, wake, func(l Limits) time.Duration { return l.GCPeriod })
			ended = true
		}()
		time.Sleep(time.Hour)
		harness.Want(t, !ended, "a period of 0 has an end")
		notify(wake)
		synctest.Wait()
		harness.Want(t, ended, "a period of 0 does not end when it is woken")
		began := time.Now()
		time.AfterFunc(time.Minute, func() { n.SetLimits(Limits{GCPeriod: time.Hour}) })
		n.awaitPeriod(n.base, nil, func(l Limits) time.Duration { return l.GCPeriod })
		harness.Same(t, "a period that was set meanwhile", time.Since(began), time.Hour)
	})
}

// A collection does not begin beside a plugin that runs, but after it.
func TestGCDoesNotRunBesideAnAdd(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.GCPeriod = often })
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.held")
	done := make(chan error, 1)
	go func() {
		_, err := n.try(t.Context(), "web")
		done <- err
	}()
	harness.Eventually(t, "ADD runs", func() bool { return len(n.calls(t, "ADD")) == 1 })
	n.runs(t)
	asked := len(n.calls(t, "STATUS"))
	harness.Eventually(t, "other work of the background is done", func() bool { return len(n.calls(t, "STATUS")) > asked+1 })
	n.untell(t, "ADD.held")
	must(t, <-done)
	harness.Eventually(t, "GC runs", func() bool { return len(n.calls(t, "GC")) > 0 })
	log := string(harness.Read(t, filepath.Join(n.scripted, "log")))
	harness.Want(t, strings.Index(log, "ADD-end") < strings.Index(log, "GC "), "GC began beside ADD: %s", log)
	n.detach(t, "web")
}

// A collection that hangs is ended for the pod that waits for it, before the pod's ADD.
func TestGCEndsForAPod(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.GCPeriod = often })
	n.journalled(t, "web", nil)
	n.tell(t, "GC.hang")
	n.runs(t)
	var hang []string
	harness.Eventually(t, "GC hangs", func() bool {
		hang = processesWith(t, mark(), "CNI_COMMAND=GC")
		return len(hang) > 0
	})
	_, err := n.try(t.Context(), "web")
	must(t, err)
	for _, process := range processesWith(t, mark(), "CNI_COMMAND=GC") {
		harness.Want(t, !slices.Contains(hang, process), "GC still ran after ADD: %s", process)
	}
	n.detach(t, "web")
}

// What did not wait for the end of a collection that cannot be killed keeps the next one away,
// and the next one is waited for again.
func TestGateBesideACollectionThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		var begun atomic.Int32
		hung, next := make(chan struct{}), make(chan struct{})
		for _, end := range []chan struct{}{hung, next} {
			go g.collect(t.Context(), func(context.Context) {
				begun.Add(1)
				<-end
			})
			synctest.Wait()
		}
		began := time.Now()
		leave, err := g.enter(t.Context())
		must(t, err)
		late, err := g.enter(t.Context())
		must(t, err)
		harness.Same(t, "the wait for a collection that hangs", time.Since(began), gcWait+process.KillLimit)
		leave()
		close(hung)
		time.Sleep(time.Second)
		harness.Want(t, begun.Load() == 1, "a collection has begun beside a run")
		late()
		time.Sleep(time.Second)
		harness.Want(t, begun.Load() == 2, "no collection has begun after the last run")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = g.enter(ctx)
		harness.WantError(t, err, "wait for CNI GC")
		close(next)
	})
}

// testGate is that of a network.
type testGate struct{ n *CNI }

func newGate() testGate { return testGate{&CNI{gates: make(map[string]*gate)}} }

func (g testGate) enter(ctx context.Context) (leave func(), err error) {
	a := newAttachment(Attachment{})
	a.lock.tryAcquire()
	h, err := g.n.enter(ctx, a)
	if err != nil {
		return nil, err
	}
	return h.release, nil
}

func (g testGate) collect(ctx context.Context, f func(context.Context)) {
	whileClosed(ctx, g.n.gate(""), f)
}

// A chain of plugins waits for one of Limits.AtOnce turns. A long run gives its turn back, and a daemon that ends does
// not wait.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &CNI{}
		n.base, n.end = context.WithCancel(t.Context())
		n.SetLimits(Limits{AtOnce: 1})
		began := time.Now()
		first, err := n.turn(t.Context(), "ADD")
		must(t, err)
		time.AfterFunc(time.Second, first)
		_, err = n.turn(t.Context(), "DEL") // it hangs
		must(t, err)
		harness.Same(t, "the wait for a run that ends", time.Since(began), time.Second)
		last, err := n.turn(t.Context(), "ADD")
		must(t, err)
		harness.Same(t, "the wait for a run that hangs", time.Since(began), time.Second+turnLimit)
		time.AfterFunc(time.Millisecond, n.end)
		_, err = n.turn(t.Context(), "DEL")
		harness.Want(t, errors.Is(err, errLeft), "a DEL while the daemon ends: %v", err)
		last()
		n.SetLimits(Limits{})
		for range 100 {
			_, err := n.turn(t.Context(), "ADD")
			must(t, err)
		}
	})
}
