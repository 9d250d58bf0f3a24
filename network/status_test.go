package network

import (
	"context"
	"strings"
	"testing"
	"time"
)

// statusLimit is the limit of a STATUS that hangs.
const statusLimit = 500 * time.Millisecond

func (n *node) limitStatus(t *testing.T, limit time.Duration) {
	t.Helper()
	limits := n.Options.Limits
	limits.Status = limit
	n.SetLimits(limits)
}

// A daemon that ends while the plugins are asked for STATUS leaves nothing of
// that to the next one: Close waits until it is killed and removed.
func TestCloseInsideASTATUS(t *testing.T) {
	n := newNode(t, nil)
	n.tell(t, "STATUS.hang")
	n.configure(t, "10.conflist", "net", n.script())
	n.reopen(t)
	n.runs(t)
	eventually(t, within, "STATUS hangs", func() bool { return len(processesWith(t, mark(), "CNI_COMMAND=STATUS")) > 0 })
	n.Close()
	if left := n.runDirs(t); len(left) > 0 {
		t.Errorf("left: %v", left)
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
	if err := n.ready(t); err != nil {
		t.Errorf("not ready: %v", err)
	}
	if calls := n.calls(t, "STATUS"); len(calls) > 0 {
		t.Errorf("asked all the same: %q", calls)
	}
	put(t, n.ConfDir+"/10.conflist", strings.ReplaceAll(old, "scripted", "missing"))
	n.reopen(t)
	n.refreshStatus()
	wantError(t, n.ready(t), "missing", "install the plugin")
}

// After a start there is no verdict before the plugins have answered, however
// long they take within the limit.
func TestNoVerdictBeforeTheFirstAnswer(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.Status = within })
	n.configure(t, "10.conflist", "net", n.script())
	n.tell(t, "STATUS.slow")
	n.reopen(t)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantError(t, n.Ready(short), "not answered STATUS yet")
	n.runs(t)
	if err := n.ready(t); err != nil {
		t.Errorf("the first verdict: %v", err)
	}
}

// One answer that does not come in time says nothing; the second one does.
func TestOneSlowStatusIsNoVerdict(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.reopen(t)
	n.refreshStatus()
	n.limitStatus(t, statusLimit)
	n.tell(t, "STATUS.hang")
	n.refreshStatus()
	if err := n.ready(t); err != nil {
		t.Errorf("not ready after one slow answer: %v", err)
	}
	n.refreshStatus()
	wantError(t, n.ready(t), "not done after 500ms")
	n.untell(t, "STATUS.hang")
	n.limitStatus(t, within)
	n.refreshStatus()
	if err := n.ready(t); err != nil {
		t.Errorf("not ready: %v", err)
	}
}
