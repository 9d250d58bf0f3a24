package network

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/network/runner"
)

// linger is a run that is over for its callers, or that an earlier daemon has begun,
// while a process of it lives.
type linger struct {
	run *runner.Run
	// deadline is when it is killed; none for one whose processes are to live for their
	// pod, or that could not be removed yet.
	deadline time.Time
	// stuck is since when its processes do not go although they were killed.
	stuck time.Time
	// held is the lock of its attachment and the place in the gate, if it has them.
	held held
	// failed is set once its cgroup could not be removed, which is logged then.
	failed bool
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
	stuck := []StuckRun{}
	for _, l := range n.plugins.lingers(func(l *linger) bool { return !l.stuck.IsZero() }) {
		pids, _ := l.run.Group.Processes()
		stuck = append(stuck, StuckRun{l.run.Verb, l.run.ID, l.run.Network, l.stuck, pids})
	}
	slices.SortFunc(stuck, func(a, b StuckRun) int { return strings.Compare(a.ID+a.Verb, b.ID+b.Verb) })
	return stuck
}

// isStuck reports whether a run of the verb is stuck that is for the network
// and for no attachment: another one would get stuck as well.
func (p *plugins) isStuck(verb, network string) bool {
	return len(p.lingers(func(l *linger) bool {
		return !l.stuck.IsZero() && l.run.Verb == verb && (l.run.Network == network || l.run.Network == "")
	})) > 0
}

func (p *plugins) lingers(are func(*linger) bool) (found []*linger) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.lingering {
		if are(l) {
			found = append(found, l)
		}
	}
	return found
}

func (p *plugins) keep(l *linger) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lingering[l] = true
}

// stick keeps a run whose processes do not end, with the lock of its attachment, if it
// is for one; the next look finds it stuck.
func (p *plugins) stick(run *runner.Run, h held) {
	p.keep(&linger{run: run, deadline: time.Now().Add(-killLimit), held: h})
}

// logger names the run in each line, and the pod that its attachment is of.
func (l *linger) logger(to *slog.Logger) *slog.Logger {
	to = to.With("verb", l.run.Verb)
	if l.held.a != nil {
		return l.held.a.record.logger(to)
	}
	return to.With("sandbox", l.run.ID, "network", l.run.Network)
}

// firstLook and lastLook are pauses between two looks at processes that are waited for;
// those that nothing waits for are looked at every seldom-th time.
const firstLook, lastLook, seldom = 10 * time.Millisecond, 200 * time.Millisecond, 25

// followLingering removes runs whose last process has ended, kills those whose time is
// over, and unlocks their attachments; one that was to be released is then.
func (n *CNI) followLingering(ctx context.Context) {
	for looks := 0; ctx.Err() == nil; looks++ {
		for _, l := range n.plugins.lookAtLingering(looks%seldom == 0) {
			a := l.held.a
			if a == nil {
				continue
			}
			if !l.stuck.IsZero() {
				l.logger(n.options.Logger).Info("plugins that did not end have ended")
				<-a.stuck
			}
			l.held.release(outcome{})
			if a.released.Load() {
				n.retries.now(a.record.ID)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(lastLook):
		}
	}
}

// lookAtLingering returns the runs that are over, of all or of those with a deadline.
func (p *plugins) lookAtLingering(all bool) (over []*linger) {
	for _, l := range p.lingers(func(l *linger) bool { return all || !l.deadline.IsZero() }) {
		switch {
		case !l.run.Running():
			if err := l.run.End(); err != nil {
				if !l.failed {
					l.logger(p.logger).Warn("a run of plugins cannot be removed, which is tried again", "err", err)
				}
				l.failed, l.deadline = true, time.Time{} // nothing is left to kill
				continue
			}
			p.mu.Lock()
			delete(p.lingering, l)
			p.mu.Unlock()
			over = append(over, l)
		case l.deadline.IsZero() || time.Now().Before(l.deadline):
		case l.run.Kill(0) != nil && time.Since(l.deadline) > killLimit && l.stuck.IsZero():
			l.logger(p.logger).Error("plugins were killed and do not end: their attachment stays locked")
			p.mu.Lock()
			l.stuck = time.Now()
			p.mu.Unlock()
			if l.held.a != nil {
				l.held.a.stuck <- struct{}{}
				l.held.leave()
			}
		}
	}
	return over
}

// awaitEnding removes the runs that have ended, and waits until its limit for
// those that are about to: nothing lives on purpose that a DEL has started.
func (p *plugins) awaitEnding(limit time.Duration) {
	ending := func(l *linger) bool { return l.deadline.IsZero() && l.run.Verb != "ADD" }
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(firstLook) {
		if p.lookAtLingering(true); len(p.lingers(ending)) == 0 {
			return
		}
	}
}

// end removes the run if nothing is left of it. Processes that a run left live on if
// it succeeded, and are killed otherwise; errStuck says that they do not end.
func (p *plugins) end(run *runner.Run, err error, killed bool) error {
	if err != nil {
		limit := killLimit
		if killed {
			limit = firstLook // they have had their time
		}
		if err := run.Kill(limit); err != nil {
			return fmt.Errorf("%w: %w", errStuck, err)
		}
	}
	if run.Running() || run.End() != nil { // the next look tries to remove it again
		p.keep(&linger{run: run})
	}
	return nil
}

// findLeftRuns finds the runs that an earlier daemon left. They may finish: one that is
// killed half-way can leave what no DEL finds again (bridge deletes the interface first,
// from which it has read the masquerade rules that it then removes). Until they have,
// their attachment is locked, because an ADD must not overlap the DEL that undoes it, and
// no GC begins; a DEL is repeated then. All verbs but ADD and DEL are ended at once.
func (n *CNI) findLeftRuns() {
	left, err := n.plugins.runner.Left()
	if err != nil {
		n.options.Logger.Error("some plugin runs of an earlier daemon are left as they are", "err", err)
	}
	for _, run := range left {
		l := &linger{run: run}
		switch a := n.find(run.ID); {
		case run.Verb != "ADD" && run.Verb != "DEL": // nothing waits for what they answer
			l.deadline = time.Now()
		case a == nil || run.Verb == "ADD" && a.attached: // it was over, and its processes are to live
		default:
			l.deadline, run.Network = run.Deadline, a.record.Network
			if run.Verb == "DEL" {
				a.released.Store(true)
			}
			if held, err := n.tryLock(n.base, a); err == nil { // else another run of it has the lock
				l.held = held
			}
		}
		n.plugins.keep(l)
	}
}
