package network

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// statusLimit is the limit of a STATUS that hangs.
const statusLimit = 500 * time.Millisecond

func (n *node) limitStatus(t *testing.T, limit time.Duration) {
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
	harness.Same(t, "left", n.runDirs(t), nil)
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
	n := newScripted(t, func(o *Options) { o.Limits.Status = within })
	n.tell(t, "STATUS.slow")
	n.reopen(t)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	harness.WantError(t, n.Ready(short), "not answered STATUS yet")
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
