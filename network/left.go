package network

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/minicri/minicri/network/runner"
)

// held is the lock of an attachment, whose holder also keeps garbage collection of its
// network away.
type held struct {
	*attachment
	leave func()
	// kept is set when the lock outlives its holder: until the processes of a run that is
	// stuck have gone, or for good with a run that is left to the next daemon.
	kept bool
}

// hold takes the attachment's lock. It does not wait for a run whose processes do not end:
// errStuck.
func (n *CNI) hold(ctx context.Context, a *attachment) (*held, error) {
	if a.stuck.Load() {
		return nil, fmt.Errorf("wait for another plugin run of sandbox %s: %w: they are listed as stuckPlugins by 'crictl info'; free them of what holds them, such as a frozen cgroup or a dead disk", a.record.ID, errStuck)
	}
	if a.lock.Acquire(ctx, 1) != nil {
		return nil, fmt.Errorf("wait for another plugin run of sandbox %s: %w", a.record.ID, context.Cause(ctx))
	}
	return n.enter(ctx, a)
}

// enter waits for a collection of the network's garbage to be over; the attachment is locked.
func (n *CNI) enter(ctx context.Context, a *attachment) (*held, error) {
	gate := n.gate(a.record.Network)
	if err := gate.Acquire(ctx, 1); err != nil {
		a.lock.Release(1)
		return nil, fmt.Errorf("wait for CNI GC to end: %w", context.Cause(ctx))
	}
	return &held{attachment: a, leave: sync.OnceFunc(func() { gate.Release(1) })}, nil
}

func (h *held) release() {
	h.leave()
	if !h.kept {
		h.lock.Release(1)
	}
}

// linger is a run that is over for its callers, or that an earlier daemon has begun,
// while a process of it lives.
type linger struct {
	run *runner.Run
	// deadline is when it is killed; none for one whose processes are to live for their
	// pod, or that could not be removed yet.
	deadline time.Time
	// stuck is since when its processes do not go although they were killed.
	stuck time.Time
	// held is the lock of its attachment, nil if it has none.
	held *held
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
	n.mu.Lock()
	defer n.mu.Unlock()
	stuck := []StuckRun{}
	for l := range n.lingering {
		if !l.stuck.IsZero() {
			pids, _ := l.run.Group.Processes()
			stuck = append(stuck, StuckRun{l.run.Verb, l.run.ID, l.run.Network, l.stuck, pids})
		}
	}
	slices.SortFunc(stuck, func(a, b StuckRun) int { return strings.Compare(a.ID+a.Verb, b.ID+b.Verb) })
	return stuck
}

// isStuck reports whether a run of the verb is stuck that is for the network
// and for no attachment: another one would get stuck as well.
func (n *CNI) isStuck(verb, network string) bool {
	return slices.ContainsFunc(n.Stuck(), func(s StuckRun) bool {
		return s.Verb == verb && (s.Network == network || s.Network == "")
	})
}

// logger names the run in each line, and the pod that its attachment is of.
func (l *linger) logger(to *slog.Logger) *slog.Logger {
	to = to.With("verb", l.run.Verb)
	if l.held != nil {
		return l.held.record.logger(to)
	}
	return to.With("sandbox", l.run.ID, "network", l.run.Network)
}

// followRun looks at a run until its last process has ended, removes it then, and unlocks its
// attachment; one that was to be released is then.
func (n *CNI) followRun(l *linger) {
	const first, most, seldom = 10 * time.Millisecond, 200 * time.Millisecond, 5 * time.Second
	n.mu.Lock()
	n.lingering[l] = true
	n.mu.Unlock()
	n.background.Go(func() {
		for pause := first; !n.isOver(l); pause = min(2*pause, seldom) {
			if !l.deadline.IsZero() {
				pause = min(pause, most) // somebody waits for its end
			}
			select {
			case <-n.base.Done():
				n.isOver(l)
				return
			case <-time.After(pause):
			}
		}
		if l.held == nil {
			return
		}
		if l.held.stuck.Swap(false) {
			l.logger(n.options.Logger).Info("plugins that did not end have ended")
		}
		l.held.leave()
		l.held.lock.Release(1)
		if l.held.released.Load() {
			n.repeat(l.held.attachment, true)
			l.held.hurry()
		}
	})
}

// isOver removes a run whose last process has ended, and kills one whose time is over.
func (n *CNI) isOver(l *linger) bool {
	if !l.run.Running() {
		err := l.run.End()
		if err == nil {
			n.mu.Lock()
			defer n.mu.Unlock()
			delete(n.lingering, l)
			return true
		}
		if !l.failed {
			l.logger(n.options.Logger).Warn("a run of plugins cannot be removed, which is tried again", "err", err)
		}
		l.failed, l.deadline = true, time.Time{} // nothing is left to kill
	}
	if l.deadline.IsZero() || time.Now().Before(l.deadline) {
		return false
	}
	if l.run.Kill(0) != nil && l.stuck.IsZero() && time.Since(l.deadline) > killLimit {
		n.stick(l)
	}
	return false
}

// stick notes that the processes of a run do not end although they were killed.
func (n *CNI) stick(l *linger) {
	l.logger(n.options.Logger).Error("plugins were killed and do not end: their attachment stays locked")
	n.mu.Lock()
	l.stuck = time.Now()
	n.mu.Unlock()
	if l.held != nil {
		l.held.kept = true
		l.held.stuck.Store(true)
		l.held.leave()
	}
}

// findLeftRuns finds the runs that an earlier daemon left. They may finish: one that is
// killed half-way can leave what no DEL finds again (bridge deletes the interface first,
// from which it has read the masquerade rules that it then removes). Until they have,
// their attachment is locked, because an ADD must not overlap the DEL that undoes it, and
// no GC begins; a DEL is repeated then. All verbs but ADD and DEL are ended at once.
func (n *CNI) findLeftRuns() {
	left, err := n.runner.Left()
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
			a.released.Store(run.Verb == "DEL" || a.released.Load())
			if a.lock.TryAcquire(1) { // else another run of it has the lock
				l.held, _ = n.enter(n.base, a) // no collection runs yet
			}
		}
		n.followRun(l)
	}
}
