package harness

import (
	"context"

	"github.com/minicri/minicri/test/leak"
)

// Look takes a snapshot of all that the node and its daemon, which must run,
// hold now: for tests that compare more often than at their end.
func (n *Node) Look() leak.Snapshot {
	n.t.Helper()
	return n.look(n.idleScope())
}

// Differences waits until the node holds again what it held before, no longer
// than the kernel may take, and returns what then is left behind or lost, one
// line for each. The daemon must run.
func (n *Node) Differences(before leak.Snapshot) []string {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), settleTime)
	defer cancel()
	scope := n.idleScope()
	var lines []string
	n.must("looking for leaks", n.inNetns(func() error {
		leaks, err := leak.Settle(ctx, before, scope)
		for _, l := range leaks {
			lines = append(lines, "left behind: "+l.String())
		}
		return err
	}))
	for _, l := range leak.Diff(n.look(scope), before) {
		if !n.mayEnd(l) {
			lines = append(lines, "lost: "+l.String())
		}
	}
	return lines
}
