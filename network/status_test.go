package network

import (
	"strings"
	"testing"
	"time"
)

// A plugin that says it is not ready makes the node not ready, with its words,
// until it says otherwise.
func TestStatusThatFails(t *testing.T) {
	n := newNode(t, nil)
	n.tell(t, "STATUS.fail")
	n.configure(t, "10.conflist", "net", n.script())
	n.reopen(t)
	wantError(t, n.Ready(), "CNI STATUS", "told to fail", "CNI error code 11")
	n.runs(t)
	n.untell(t, "STATUS.fail")
	eventually(t, follows, "ready", func() bool { return n.Ready() == nil })
	n.tell(t, "STATUS.fail")
	n.wantNotReady(t)
}

// A plugin that hangs at STATUS makes the node not ready, and nobody who asks
// ever waits for it.
func TestStatusThatHangs(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.runs(t)
	eventually(t, follows, "ready", func() bool { return n.Ready() == nil })
	n.tell(t, "STATUS.hang")
	for began := time.Now(); n.Ready() == nil; time.Sleep(5 * time.Millisecond) {
		asked := time.Now()
		_ = n.Ready()
		if took := time.Since(asked); took > 100*time.Millisecond {
			t.Errorf("Ready took %v", took)
		}
		if time.Since(began) > follows {
			t.Fatal("ready while STATUS hangs")
		}
	}
	eventually(t, follows, "the reason is told", func() bool {
		err := n.Ready()
		return err != nil && strings.Contains(err.Error(), "not done after 500ms")
	})
	n.journalled(t, "web", nil)
	n.attach(t, "web")
	n.detach(t, "web")
	n.untell(t, "STATUS.hang")
	eventually(t, follows, "ready again", func() bool { return n.Ready() == nil })
	eventually(t, within, "nothing of STATUS runs", func() bool { return len(processesWith(t, n.Mark, "CNI_COMMAND=STATUS")) == 0 })
}

// An answer that has grown old does not count: a loop that hangs is not ready.
func TestOldStatusDoesNotCount(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.reopen(t)
	if err := n.Ready(); err != nil {
		t.Fatal(err)
	}
	limits := n.Options.Limits
	time.Sleep(limits.StatusPeriod + 2*limits.Status + 50*time.Millisecond)
	wantError(t, n.Ready(), "have not answered STATUS")
}

// Before CNI 1.1 there is no STATUS; that the programs are there has to do.
func TestStatusOfOlderNetworks(t *testing.T) {
	n := newNode(t, nil)
	n.tell(t, "STATUS.fail")
	old := marshal(t, map[string]any{"cniVersion": "1.0.0", "name": "old", "plugins": []any{n.script()}})
	put(t, n.ConfDir+"/10.conflist", old)
	n.reopen(t)
	if err := n.Ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
	if calls := n.calls(t, "STATUS"); len(calls) > 0 {
		t.Errorf("asked all the same: %q", calls)
	}
	put(t, n.ConfDir+"/10.conflist", strings.ReplaceAll(old, "scripted", "missing"))
	n.reopen(t)
	wantError(t, n.Ready(), "missing", "install the plugin")
}
