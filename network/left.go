package network

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/minicri/minicri/network/runner"
)

// lingering are the runs that are over for their callers while a process of
// them lives: some because a plugin wants it so, some because it does not end.
type lingering struct {
	mu sync.Mutex
	// helpers are runs that succeeded and left processes to live, and those that
	// could not be removed yet.
	helpers []*runner.Run
	// stuck are runs whose processes did not go when they were killed, and
	// since when.
	stuck map[*runner.Run]time.Time
}

// StuckRun is a run of plugins whose processes did not end when they were
// killed: they are frozen, or in an uninterruptible sleep.
type StuckRun struct {
	Verb      string    `json:"verb"`
	ID        string    `json:"sandbox,omitempty"`
	Network   string    `json:"network"`
	Since     time.Time `json:"since"`
	Processes []int     `json:"processes"`
}

// Stuck are the runs of plugins that could not be ended. Each keeps the lock of
// its attachment, and nothing else.
func (n *CNI) Stuck() []StuckRun {
	l := &n.plugins.lingering
	l.mu.Lock()
	defer l.mu.Unlock()
	stuck := []StuckRun{}
	for run, since := range l.stuck {
		pids, _ := run.Group.Processes()
		stuck = append(stuck, StuckRun{run.Verb, run.ID, run.Network, since, pids})
	}
	slices.SortFunc(stuck, func(a, b StuckRun) int { return strings.Compare(a.ID+a.Verb, b.ID+b.Verb) })
	return stuck
}

// awaitStuck waits in the background until the processes of a stuck run have
// gone, and then calls over.
func (n *CNI) awaitStuck(run *runner.Run, over func()) {
	n.options.Logger.Error("plugins were killed and do not end: their attachment stays locked",
		"verb", run.Verb, "sandbox", run.ID, "network", run.Network)
	n.plugins.lingering.noteStuck(run)
	n.background.Go(func() {
		if n.awaitEnd(n.base, run, time.Now().Add(-killLimit)) {
			n.options.Logger.Info("plugins that did not end have ended", "verb", run.Verb, "sandbox", run.ID)
			over()
		}
	})
}

func (l *lingering) noteStuck(run *runner.Run) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stuck == nil {
		l.stuck = make(map[*runner.Run]time.Time)
	}
	if _, noted := l.stuck[run]; !noted {
		l.stuck[run] = time.Now()
	}
}

func (l *lingering) unstick(run *runner.Run) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.stuck, run)
}

// isStuck reports whether a run of the verb is stuck that is for the network
// and for no attachment: another one would get stuck as well.
func (l *lingering) isStuck(verb, network string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for run := range l.stuck {
		if run.Verb == verb && run.ID == "" && (run.Network == network || run.Network == "") {
			return true
		}
	}
	return false
}

func (l *lingering) keep(run *runner.Run) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.helpers = append(l.helpers, run)
}

// followHelpers removes the runs whose last process has ended that a plugin had
// left running for its pod.
func (n *CNI) followHelpers(ctx context.Context) {
	const period = time.Second
	for {
		n.plugins.removeEnded()
		select {
		case <-ctx.Done():
			return
		case <-time.After(period):
		}
	}
}

// removeEnded removes the runs that were kept and of which nothing runs any more.
func (p *plugins) removeEnded() {
	l := &p.lingering
	l.mu.Lock()
	helpers := l.helpers
	l.helpers = nil
	l.mu.Unlock()
	for _, run := range helpers {
		if run.Running() {
			l.keep(run)
		} else {
			p.remove(run)
		}
	}
}

// awaitEnding removes the runs that have ended, and waits until its limit for
// those that are about to: nothing lives on purpose that a DEL has started.
func (p *plugins) awaitEnding(limit time.Duration) {
	for deadline := time.Now().Add(limit); ; time.Sleep(firstLook) {
		p.removeEnded()
		if !p.lingering.ending() || time.Now().After(deadline) {
			return
		}
	}
}

// ending reports whether a run is kept that left nothing running on purpose.
func (l *lingering) ending() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.helpers, func(run *runner.Run) bool { return run.Verb != "ADD" })
}

func (p *plugins) remove(run *runner.Run) {
	if err := run.End(); err != nil {
		p.logger.Error("the cgroup of a plugin run that is over could not be removed: this is retried", "verb", run.Verb, "sandbox", run.ID, "err", err)
		p.lingering.keep(run)
	}
}

// end removes the run if nothing is left of it. Processes that a run left live on if
// it succeeded, and are killed otherwise; errStuck says that they do not end.
func (p *plugins) end(run *runner.Run, err error, killed bool) error {
	if !run.Running() {
		p.remove(run)
		return nil
	}
	if err == nil {
		p.lingering.keep(run)
		return nil
	}
	limit := killLimit
	if killed {
		limit = firstLook // they have had their time
	}
	if err := run.Kill(limit); err != nil {
		return fmt.Errorf("%w: %w", errStuck, err)
	}
	p.remove(run)
	return nil
}

// findLeftRuns finds the runs that an earlier daemon left. They may finish: one
// that is killed half-way can leave what no DEL finds again (bridge deletes the
// interface first, from which it has read the masquerade rules that it then
// removes). Until they have, their attachment is locked, because an ADD must
// not overlap the DEL that undoes it; nothing else waits for them.
func (n *CNI) findLeftRuns() {
	left, err := n.plugins.runner.Left()
	if err != nil {
		n.options.Logger.Error("some plugin runs of an earlier daemon are left as they are", "err", err)
	}
	n.left = make(map[string][]*runner.Run)
	for _, run := range left {
		a := n.find(run.ID)
		switch {
		case run.Verb != "ADD" && run.Verb != "DEL": // nothing waits for what they answer
			n.left[""] = append(n.left[""], run)
		case a == nil || run.Verb == "ADD" && a.attached: // it was over, and its processes are to live
			n.plugins.lingering.keep(run)
		default:
			if n.left[run.ID] == nil {
				a.lock <- struct{}{} // free: nothing runs yet
			}
			n.left[run.ID] = append(n.left[run.ID], run)
		}
	}
}

// awaitLeftRuns waits for the runs of an earlier daemon, each within its limit. What
// has no attachment is ended at once.
func (n *CNI) awaitLeftRuns(ctx context.Context) {
	for id, runs := range n.left {
		if id != "" {
			a := n.find(id)
			n.background.Go(func() { n.awaitLeft(ctx, a, runs) })
			continue
		}
		for _, run := range runs {
			n.background.Go(func() { n.awaitEnd(ctx, run, time.Now()) })
		}
	}
	n.left = nil
}

// awaitLeft waits for the runs of an attachment and unlocks it; a DEL is repeated then.
// Where the daemon ends first, the next one finds them again.
func (n *CNI) awaitLeft(ctx context.Context, a *attachment, runs []*runner.Run) {
	for _, run := range runs {
		run.Network = a.record.Network
		if !n.awaitEndApart(ctx, a, run) {
			return
		}
		n.options.Logger.Info("a plugin run that an earlier daemon began is over", "verb", run.Verb, "sandbox", run.ID, "network", run.Network)
		if run.Verb == "DEL" {
			a.released.Store(true)
		}
	}
	<-a.lock
	if a.released.Load() {
		n.retries.now(a.record.ID)
	}
}

// awaitEndApart is awaitEnd, and keeps GC away for as long as the run may take. The
// attachment is stuck from then on.
func (n *CNI) awaitEndApart(ctx context.Context, a *attachment, run *runner.Run) bool {
	gate := n.gate(run.Network)
	gate.begin()
	within, cancel := context.WithDeadline(ctx, run.Deadline.Add(killLimit))
	ended := n.awaitEnd(within, run, run.Deadline)
	cancel()
	gate.leave()
	if ended || ctx.Err() != nil {
		return ended
	}
	a.stuck <- struct{}{}
	defer func() { <-a.stuck }()
	return n.awaitEnd(ctx, run, run.Deadline)
}

// The pauses between two looks at processes that are waited for.
const firstLook, lastLook = 10 * time.Millisecond, 200 * time.Millisecond

// awaitEnd waits until nothing of the run is left, kills what is left after
// the deadline, and removes the run. It reports false if the context ends first.
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
	n.plugins.remove(run)
	return true
}
