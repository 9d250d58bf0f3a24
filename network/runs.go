package network

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/minicri/minicri/network/runner"
)

// findLeftRuns finds the runs that an earlier daemon left. They may finish: one
// that is killed half-way can leave what no DEL finds again (bridge deletes the
// interface first, from which it has read the masquerade rules that it then
// removes). Until they have, their attachment is locked, because an ADD must
// not overlap the DEL that undoes it; nothing else waits for them.
func (n *CNI) findLeftRuns() {
	unfinished, done, err := n.plugins.runner.Runs()
	if err != nil {
		n.options.Logger.Error("some plugin runs of an earlier daemon cannot be read", "err", err)
	}
	for _, run := range done {
		n.plugins.lingering.keep(run)
	}
	n.left = make(map[string][]*runner.Run)
	for _, run := range unfinished {
		n.left[run.ID] = append(n.left[run.ID], run)
	}
	n.leftAtStart = len(unfinished) > 0
	for id := range n.left {
		if a := n.find(id); a != nil {
			a.lock <- struct{}{} // free: nothing runs yet
		}
	}
}

// awaitLeftRuns waits for the runs of an earlier daemon, each within the limit
// of its verb, and takes their results.
func (n *CNI) awaitLeftRuns(ctx context.Context) {
	for id, runs := range n.left {
		if a := n.find(id); a != nil {
			n.background.Go(func() { n.takeResults(ctx, a, runs) })
			continue
		}
		for _, run := range runs {
			n.background.Go(func() { n.endLeftRun(ctx, run) })
		}
	}
	n.left = nil
}

// endLeftRun ends a run that is for no attachment. Nothing waits for what
// STATUS answers; a GC has the time that it was given.
func (n *CNI) endLeftRun(ctx context.Context, run *runner.Run) {
	deadline := time.Now()
	if run.Verb == "GC" {
		deadline = run.Deadline()
		over := n.gate(run.Network).occupy()
		defer over()
	}
	if n.awaitEnd(ctx, run, deadline) {
		n.plugins.remove(run)
	}
}

// takeResults waits for the runs of an attachment and unlocks it. Where the
// daemon ends first, the next one finds them again.
func (n *CNI) takeResults(ctx context.Context, a *attachment, runs []*runner.Run) {
	for _, run := range runs {
		if !n.awaitEndApart(ctx, a, run) {
			return
		}
		n.takeResult(a, run)
		n.plugins.remove(run)
	}
	<-a.lock
	if a.released.Load() {
		n.retries.now(a.record.ID)
	}
}

// awaitEndApart is awaitEnd, and keeps GC away for as long as the run may take. The
// attachment is stuck from then on.
func (n *CNI) awaitEndApart(ctx context.Context, a *attachment, run *runner.Run) bool {
	gate, deadline := n.gate(run.Network), run.Deadline()
	gate.begin()
	within, cancel := context.WithDeadline(ctx, deadline.Add(killLimit))
	ended := n.awaitEnd(within, run, deadline)
	cancel()
	gate.leave()
	if ended || ctx.Err() != nil {
		return ended
	}
	a.stuck <- struct{}{}
	defer func() { <-a.stuck }()
	return n.awaitEnd(ctx, run, deadline)
}

// takeResult takes what a run of an earlier daemon came to. A DEL to which every
// plugin said yes is not repeated; any other one is, and at once.
func (n *CNI) takeResult(a *attachment, run *runner.Run) {
	if run.Verb != "DEL" || a.removed {
		return
	}
	reports, err := run.Reports()
	if err == nil {
		err = run.Verdict(reports)
	}
	if err == nil {
		err = errors.Join(removeCached(run.Network, run.ID), n.remove(a))
	}
	if err == nil {
		err = n.options.Namespaces.Remove(run.ID)
	}
	n.options.Logger.Info("a DEL that an earlier daemon began has ended", "sandbox", run.ID, "network", run.Network, "err", err)
	if !a.removed {
		a.released.Store(true)
	}
}

// removeCached removes what libcni remembers of an ADD, as it does itself after
// a DEL.
func removeCached(network, id string) error {
	err := os.Remove(filepath.Join(libcni.CacheDir, "results", network+"-"+id+"-"+eth0))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// The pauses between two looks at processes that are waited for.
const firstLook, lastLook = 10 * time.Millisecond, 200 * time.Millisecond

// awaitEnd waits until nothing of the run is left, and kills what is left after
// the deadline. It reports false if the context ends first.
func (n *CNI) awaitEnd(ctx context.Context, run *runner.Run, deadline time.Time) bool {
	for pause := firstLook; run.Running(); pause = min(2*pause, lastLook) {
		if time.Now().After(deadline) {
			_ = run.Kill(0) // what does not go is asked again
		}
		if time.Now().After(deadline.Add(killLimit)) {
			n.plugins.lingering.noteStuck(run)
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
	n.plugins.lingering.unstick(run)
	return true
}
