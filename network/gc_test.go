package network

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

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
	eventually(t, within, "both networks are collected", func() bool {
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
		"by the node": func(t *testing.T, n *node) {
			n.configure(t, "10.conflist", "net", n.script())
			limits := n.Options.Limits
			limits.GCPeriod = 0
			n.SetLimits(limits)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, func(o *Options) { o.Limits.GCPeriod = often })
			configure(t, n)
			n.Reload()
			n.runs(t)
			time.Sleep(3 * often)
			harness.Same(t, "collected", n.calls(t, "GC"), nil)
		})
	}
}

// A collection does not begin beside a plugin that runs.
func TestGCDoesNotRunBesideAnAdd(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.GCPeriod = often })
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.hang")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := n.Attach(ctx, "web", n.Options.Namespaces.Path("web"))
		done <- err
	}()
	hanging(t, "web")
	n.runs(t)
	time.Sleep(3 * often)
	harness.Same(t, "collected beside ADD", n.calls(t, "GC"), nil)
	cancel()
	<-done
	n.detach(t, "web")
}

// A collection that hangs is ended for the pod that waits for it, before the pod's ADD.
func TestGCEndsForAPod(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.GCPeriod = often })
	n.journalled(t, "web", nil)
	n.tell(t, "GC.hang")
	n.runs(t)
	var hang []string
	eventually(t, within, "GC hangs", func() bool {
		hang = processesWith(t, mark(), "CNI_COMMAND=GC")
		return len(hang) > 0
	})
	_, err := n.Attach(t.Context(), "web", n.Options.Namespaces.Path("web"))
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
	a.lock.TryAcquire(1)
	h, err := g.n.enter(ctx, a)
	if err != nil {
		return nil, err
	}
	return h.release, nil
}

func (g testGate) collect(ctx context.Context, f func(context.Context)) {
	whileClosed(ctx, g.n.gate(""), f)
}
