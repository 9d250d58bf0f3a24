package network

import (
	"context"
	"errors"
	"fmt"
)

// held is the lock of an attachment, and the presence in the gate of its
// network that keeps garbage collection away.
type held struct {
	n     *CNI
	a     *attachment
	leave func()
}

// lock takes the attachment's lock. It does not wait for a run whose processes do
// not end: errStuck.
func (n *CNI) lock(ctx context.Context, a *attachment) (held, error) {
	select {
	case a.lock <- struct{}{}:
		return n.enter(ctx, a)
	case <-a.stuck:
		a.stuck <- struct{}{}
		return held{}, fmt.Errorf("wait for another plugin run of sandbox %s: %w: they are listed as stuckPlugins by 'crictl info'; free them of what holds them, such as a frozen cgroup or a dead disk", a.record.ID, errStuck)
	case <-ctx.Done():
		return held{}, fmt.Errorf("wait for another plugin run of sandbox %s: %w", a.record.ID, context.Cause(ctx))
	}
}

var errLocked = errors.New("plugins run for the attachment")

// tryLock takes the attachment's lock if it is free.
func (n *CNI) tryLock(ctx context.Context, a *attachment) (held, error) {
	select {
	case a.lock <- struct{}{}:
		return n.enter(ctx, a)
	default:
		return held{}, errLocked
	}
}

func (n *CNI) enter(ctx context.Context, a *attachment) (held, error) {
	leave, err := n.gate(a.record.Network).enter(ctx)
	if err != nil {
		<-a.lock
		return held{}, err
	}
	return held{n, a, leave}, nil
}

// release gives the lock back. Where a run is stuck it does so when its
// processes have gone, and where a run is left to the next daemon never:
// nothing else may run for the same sandbox at the same time.
func (h held) release(o outcome) {
	h.leave()
	switch {
	case o.stuck != nil:
		h.n.plugins.stick(o.stuck, h)
	case !errors.Is(o.err, errLeft):
		<-h.a.lock
	}
}
