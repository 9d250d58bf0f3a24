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
			n.plugins.remove(run)
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
		if run.Verb == verb && run.ID == "" && run.Network == network {
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

// takeHelpers are the helpers, for the caller to keep again those that live.
func (l *lingering) takeHelpers() []*runner.Run {
	l.mu.Lock()
	defer l.mu.Unlock()
	helpers := l.helpers
	l.helpers = nil
	return helpers
}

// helperPeriod is between two looks at processes that plugins have left
// running.
const helperPeriod = time.Second

// followHelpers removes the runs whose last process has ended that a plugin had
// left running for its pod.
func (n *CNI) followHelpers(ctx context.Context) {
	for {
		n.plugins.removeEnded()
		select {
		case <-ctx.Done():
			return
		case <-time.After(helperPeriod):
		}
	}
}

// removeEnded removes the runs that were kept and of which nothing runs any more.
func (p *plugins) removeEnded() {
	for _, run := range p.lingering.takeHelpers() {
		if run.Running() {
			p.lingering.keep(run)
		} else {
			p.remove(run)
		}
	}
}

// awaitEnding removes the runs that have ended, and waits until its limit for
// those that are about to: nothing lives on purpose that a DEL has started.
func (p *plugins) awaitEnding() {
	for deadline := time.Now().Add(p.endingLimit); ; time.Sleep(firstLook) {
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

// keepHelpers leaves the processes of a run that succeeded to live.
func (p *plugins) keepHelpers(run *runner.Run) {
	if err := run.Done(); err != nil {
		p.logger.Error("the next daemon will kill a process that a plugin has left in the background", "sandbox", run.ID, "err", err)
	}
	p.lingering.keep(run)
}

func (p *plugins) remove(run *runner.Run) {
	if err := run.End(); err != nil {
		p.logger.Error("the files of a plugin run that is over could not be removed: this is retried", "verb", run.Verb, "sandbox", run.ID, "err", err)
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
		p.keepHelpers(run)
		return nil
	}
	limit := killLimit
	if killed {
		limit = lastLimit // they have had their time
	}
	if err := run.Kill(limit); err != nil {
		return fmt.Errorf("%w: %w", errStuck, err)
	}
	p.remove(run)
	return nil
}
