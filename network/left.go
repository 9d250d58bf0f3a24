package network

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sync/semaphore"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/network/runner"
)

// linger is a run with living processes whose callers have returned, or which an earlier daemon began.
type linger struct {
	run *runner.Run
	// deadline is when it is killed, zero if its processes belong to their pod or have exited. stuck is since
	// when they do not end, failed whether a failure to remove the cgroup was logged.
	deadline, stuck time.Time
	locked          *locked
	failed          bool
}

// StuckRun is a plugin run whose killed processes are frozen or in uninterruptible sleep.
type StuckRun struct {
	Verb      string    `json:"verb"`
	ID        string    `json:"sandbox,omitempty"`
	Network   string    `json:"network"`
	Since     time.Time `json:"since"`
	Processes []int     `json:"processes"`
	group     cgroup.Group
}

// Stuck returns the runs that could not be ended. Each keeps only its attachment's lock.
func (n *CNI) Stuck() []StuckRun {
	stuck := []StuckRun{}
	n.mu.Lock()
	for l := range n.lingering {
		if !l.stuck.IsZero() {
			stuck = append(stuck, StuckRun{l.run.Verb, l.run.ID, l.run.Network, l.stuck, nil, l.run.Group})
		}
	}
	n.mu.Unlock()
	for i := range stuck {
		stuck[i].Processes, _ = stuck[i].group.Processes()
	}
	slices.SortFunc(stuck, func(a, b StuckRun) int { return strings.Compare(a.ID+a.Verb, b.ID+b.Verb) })
	return stuck
}

// isStuck reports whether a network's run of a verb for no attachment is stuck: the next one would be, too.
func (n *CNI) isStuck(verb, network string) bool {
	return slices.ContainsFunc(n.Stuck(), func(s StuckRun) bool {
		return s.Verb == verb && (s.Network == network || s.Network == "")
	})
}

func (l *linger) logger(to *slog.Logger) *slog.Logger {
	to = to.With("verb", l.run.Verb)
	if l.locked != nil {
		return l.locked.record.logger(to)
	}
	return to.With("sandbox", l.run.ID, "network", l.run.Network)
}

// followRun removes a run once its processes have exited, unlocks its attachment and does a late Release.
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
		if l.locked == nil {
			return
		}
		if l.locked.lock.isStuck() {
			l.locked.lock.unstick()
			l.logger(n.options.Logger).Info("plugins that did not end have ended")
		}
		l.locked.leave()
		l.locked.lock.release()
		if l.locked.released.Load() {
			n.repeat(l.locked.attachment, true)
			notify(l.locked.hurried)
		}
	})
}

// isOver removes a run without processes and kills one whose deadline has passed.
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
	if l.run.Kill(0) != nil && l.stuck.IsZero() && time.Since(l.deadline) > process.KillLimit {
		n.stick(l)
	}
	return false
}

// stick notes that the killed processes of a run do not end.
func (n *CNI) stick(l *linger) {
	l.logger(n.options.Logger).Error("plugins were killed and do not end: their attachment stays locked")
	n.mu.Lock()
	l.stuck = time.Now()
	n.mu.Unlock()
	if l.locked != nil {
		l.locked.lock.stick()
		l.locked.leave()
	}
}

// findLeftRuns finds the runs of an earlier daemon. ADD and DEL may finish: a killed one can leave what no
// DEL finds (bridge first deletes the interface that it knows the masquerade rules from). They lock their
// attachment, so that no ADD overlaps its DEL and no GC begins, and DEL is repeated afterwards.
func (n *CNI) findLeftRuns() {
	left, err := n.runs.Left()
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
			if last := time.Now().Add(n.limits.Load().Del); run.Verb == "DEL" && last.Before(l.deadline) {
				l.deadline = last // the rest of its chain does not begin
			}
			a.released.Store(run.Verb == "DEL" || a.released.Load())
			if a.lock.tryAcquire() { // else another run of it has the lock
				l.locked, _ = n.enter(n.base, a) // no collection runs yet
			}
		}
		n.followRun(l)
	}
}

// gate keeps GC of a network, which takes all of it, apart from other runs, which take 1 each (CNI SPEC, "GC").
type gate struct {
	*semaphore.Weighted
	left chan struct{}          // has a value when a run has ended since GC looked last
	end  atomic.Pointer[func()] // ends the GC that runs, for a run that has waited for gcWait; it comes again
}

func (n *CNI) gate(network string) *gate {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gates[network] == nil {
		n.gates[network] = &gate{Weighted: semaphore.NewWeighted(math.MaxInt64), left: make(chan struct{}, 1)}
	}
	return n.gates[network]
}

// leave ends so many runs behind the gate.
func (g *gate) leave(runs int64) {
	g.Release(runs)
	notify(g.left)
}

// whileClosed calls f when nothing runs behind the gate, unless the context ends first; new runs wait. It tries after
// the end of each run, because a waiter for all of a semaphore blocks waiters for 1.
func whileClosed(ctx context.Context, gate *gate, f func(context.Context)) {
	for !gate.TryAcquire(math.MaxInt64) {
		select {
		case <-gate.left:
		case <-ctx.Done():
			return
		}
	}
	open := sync.OnceFunc(func() { gate.leave(math.MaxInt64) })
	defer open()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gate.end.Store(new(func() {
		cancel(fmt.Errorf("a pod waited %v for it: %w", gcWait, errLate))
		time.AfterFunc(process.KillLimit, open) // what cannot be killed holds up nobody
	}))
	defer gate.end.Store(nil)
	f(ctx)
}

// collectPeriodically runs GC at the start and then once in a period.
func (n *CNI) collectPeriodically() {
	for n.base.Err() == nil {
		var networks sync.WaitGroup
		if n.limits.Load().GCPeriod > 0 {
			for _, c := range n.networksInUse() {
				networks.Go(func() {
					whileClosed(n.base, n.gate(c.Name), func(ctx context.Context) { n.collect(ctx, c) })
				})
			}
		}
		networks.Wait()
		n.awaitPeriod(n.base, nil, func(l Limits) time.Duration { return l.GCPeriod })
	}
}

// collect runs GC of a network (CNI SPEC, "GC"): its plugins free what belongs to no attachment. It calls
// libcni, which honours disableGC, because go-cni has no GC.
func (n *CNI) collect(ctx context.Context, c *Configuration) {
	if n.isStuck("GC", c.Name) {
		return
	}
	valid := []types.GCAttachment{}
	ids := append(n.attachedTo(c.Name), n.unread...)
	for _, file := range n.journal.Quarantined() { // their pods may run
		ids = append(ids, state.IDOf(file))
	}
	for _, id := range ids {
		valid = append(valid, types.GCAttachment{ContainerID: id, IfName: eth0})
	}
	request := runner.Request{Verb: "GC", Network: c.Name, Limit: n.limits.Load().GC}
	err := n.run(ctx, nil, request, func(ctx context.Context, run *runner.Run) error {
		list, err := libcni.NetworkConfFromBytes(c.Bytes)
		if err != nil {
			return err
		}
		// GCNetworkList runs DEL for every cached attachment that is not in our list. libcni's own cache is
		// shared by all runtimes of a machine, so we give it another one. Our attachments are in the journal.
		cni := libcni.NewCNIConfigWithCacheDir(searchedBy(c.Bytes, n.options.BinDirs), n.journalDir()+".gc", run)
		return cni.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: valid})
	})
	if err != nil && n.base.Err() == nil {
		n.options.Logger.Warn("CNI GC failed", "network", c.Name, "err", err)
	}
	n.freeLost(c, ids)
}

// networksInUse returns configurations by network name: the journal's and the present ones, of which the node's win.
func (n *CNI) networksInUse() map[string]*Configuration {
	networks := make(map[string]*Configuration)
	n.mu.Lock()
	for _, a := range n.attachments {
		networks[a.record.Network] = &Configuration{Name: a.record.Network, Bytes: a.record.Config}
	}
	n.mu.Unlock()
	for _, d := range n.directories() {
		if c, err := d.Configuration(); err == nil {
			networks[c.Name] = c
		}
	}
	return networks
}
