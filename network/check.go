package network

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
)

// Drift is what CHECK found of an attachment that is not as ADD left it: an
// address, a link or a route is gone, say.
type Drift struct {
	ID      string    `json:"sandbox"`
	Network string    `json:"network"`
	Since   time.Time `json:"since"`
	Error   string    `json:"error"`
}

// checkPeriodically runs CHECK over all attachments once in a period, and when
// RequestCheck asks for it.
func (n *CNI) checkPeriodically(ctx context.Context) {
	for {
		n.awaitPeriod(ctx, n.checkNow, func(l Limits) time.Duration { return l.CheckPeriod })
		if ctx.Err() != nil {
			return
		}
		for _, id := range n.ids() {
			n.check(ctx, id)
		}
	}
}

// RequestCheck has all attachments checked now, in the background.
func (n *CNI) RequestCheck() {
	select {
	case n.checkNow <- struct{}{}:
	default: // one is about to begin
	}
}

// check runs CHECK for one attachment and keeps what it found. A drift is shown
// and never acted upon: it is for people to decide what becomes of a pod.
func (n *CNI) check(ctx context.Context, id string) {
	a := n.find(id)
	if a == nil {
		return
	}
	held, err := n.lock(ctx, a)
	if err != nil {
		return
	}
	var o outcome
	defer func() { held.release(o) }()
	if a.removed || !a.attached || a.record.Releasing || a.released.Load() {
		return
	}
	o = n.plugins.check(context.WithoutCancel(ctx), a.record, n.NamespacePath(id))
	if ctx.Err() != nil || errors.Is(o.err, errEnding) || errors.Is(o.err, libcni.ErrorCheckNotSupp) {
		return // the last: a network before CNI 0.4.0 has no CHECK
	}
	n.noteDrift(a, o.err)
}

func (n *CNI) noteDrift(a *attachment, err error) {
	last := a.drift.Load()
	switch {
	case err == nil:
		a.drift.Store(nil)
		if last != nil {
			a.record.logger(n.options.Logger).Info("the attachment is as ADD left it again")
		}
	case last == nil:
		a.drift.Store(&Drift{ID: a.record.ID, Network: a.record.Network, Since: time.Now(), Error: err.Error()})
		a.record.logger(n.options.Logger).Warn("the attachment is not as ADD left it", "err", err)
	}
}

// Drifted are the attachments that the last CHECK found changed, by id.
func (n *CNI) Drifted() []Drift {
	n.mu.Lock()
	defer n.mu.Unlock()
	drifted := []Drift{}
	for _, a := range n.attachments {
		if drift := a.drift.Load(); drift != nil {
			drifted = append(drifted, *drift)
		}
	}
	slices.SortFunc(drifted, func(a, b Drift) int { return strings.Compare(a.ID, b.ID) })
	return drifted
}
