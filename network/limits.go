package network

import (
	"context"
	"time"
)

// limitsInForce are limits and since when they are in force; replaced is closed when
// others are.
type limitsInForce struct {
	Limits
	since    time.Time
	replaced chan struct{}
}

// SetLimits puts other limits into force: for runs and retries that begin from now
// on, and for every period at once. It is not called twice at a time.
func (n *CNI) SetLimits(limits Limits) {
	before := n.limits.Load()
	if before != nil && before.Limits == limits {
		return
	}
	n.limits.Store(&limitsInForce{limits, time.Now(), make(chan struct{})})
	if before == nil {
		return // Open's
	}
	n.retries.setPauses(limits.RetryFirst, limits.RetryMost)
	close(before.replaced)
}

// awaitPeriod waits for the period that is in force, which may change while it waits;
// a period of 0 does not end. It returns early at wake, and when the context ends.
func (n *CNI) awaitPeriod(ctx context.Context, wake <-chan struct{}, period func(Limits) time.Duration) {
	for began := time.Now(); ; {
		limits := n.limits.Load()
		var due <-chan time.Time
		if p := period(limits.Limits); p > 0 {
			due = time.After(p - time.Since(began))
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
			return
		case <-due:
			return
		case <-limits.replaced:
		}
	}
}
