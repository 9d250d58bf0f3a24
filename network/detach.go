package network

import (
	"context"
	"fmt"
	"time"

	gocni "github.com/containerd/go-cni"
)

// Detach runs DEL for the attachment of id, in the namespace at path, or with
// an empty CNI_NETNS when path is "". Where there is no attachment there is
// nothing to do. A DEL that fails is repeated in the background from then on;
// Detach reports the failure until the tries or the time of the limits are
// used up, and nil after that: the attachment then lives on in the journal
// and no longer blocks anybody.
func (n *CNI) Detach(ctx context.Context, id, path string) error {
	a := n.find(id)
	if a == nil {
		return nil
	}
	unlock, err := n.lock(ctx, a)
	if err != nil {
		return err
	}
	failed := false
	defer func() {
		unlock()
		// Only now: the background passes over what is locked.
		if failed {
			n.wakeRetry()
		}
	}()
	if a.struck || n.patienceOver(a.record) {
		return nil
	}
	err = n.delete(ctx, a, path)
	failed = err != nil
	if failed && n.patienceOver(a.record) {
		n.options.Logger.Error("the pod's deletion goes on without CNI DEL, which is repeated in the background",
			"sandbox", id, "network", a.record.Network, "tries", a.record.Tries, "err", err)
		return nil
	}
	return err
}

func (n *CNI) patienceOver(a Attachment) bool {
	limits := n.options.Limits
	return a.Tries >= limits.DetachTries || (a.Tries > 0 && time.Since(a.FirstFailure) >= limits.DetachTime)
}

// delete runs DEL and strikes the attachment out, or notes the failure; the
// attachment's lock is held.
func (n *CNI) delete(ctx context.Context, a *attachment, path string) error {
	err := n.plugins.run(ctx, run{verb: "DEL", limit: n.options.Limits.Del, config: a.record.Config, id: a.record.ID},
		func(ctx context.Context, cni gocni.CNI) error {
			return cni.Remove(ctx, a.record.ID, path, a.record.options()...)
		})
	if err == nil {
		return n.strike(a)
	}
	return n.noteFailure(a, err)
}

func (n *CNI) noteFailure(a *attachment, err error) error {
	if a.record.Tries == 0 {
		a.record.FirstFailure = time.Now()
	}
	a.record.Releasing = true
	a.record.Tries++
	a.record.LastError = err.Error()
	a.show()
	if writeErr := n.journal.Write(a.record.ID, a.record); writeErr != nil {
		n.options.Logger.Error("the journal does not show a failed DEL", "sandbox", a.record.ID, "err", writeErr)
	}
	return fmt.Errorf("%w (try %d; it is repeated in the background)", err, a.record.Tries)
}

// Release hands the attachment of id to the background: its DEL runs there,
// with an empty CNI_NETNS once the namespace is gone, until it succeeds. It
// does not wait for a plugin that runs.
func (n *CNI) Release(id string) {
	a := n.find(id)
	if a == nil {
		return
	}
	a.released.Store(true)
	n.wakeRetry()
}

// Attached tells whether DEL is still to run for id. Until then its namespace
// has to stay: without it, plugins do not find all that they made outside of
// it (bridge leaves its masquerade rules behind).
func (n *CNI) Attached(id string) bool { return n.find(id) != nil }

// ReleaseUnknown releases the attachments of sandboxes that do not exist:
// what a daemon left that was killed between two writes.
func (n *CNI) ReleaseUnknown(exists func(id string) bool) {
	for _, id := range n.ids() {
		if !exists(id) {
			n.options.Logger.Info("release an attachment that no sandbox owns", "sandbox", id)
			n.Release(id)
		}
	}
}

func (n *CNI) ids() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	ids := make([]string, 0, len(n.attachments))
	for id := range n.attachments {
		ids = append(ids, id)
	}
	return ids
}

func (n *CNI) wakeRetry() {
	select {
	case n.retry <- struct{}{}:
	default:
	}
}

// retryDetach repeats the DELs that wait, one after the other, and pauses
// longer after each round that left some. New ones do not wait for the pause.
func (n *CNI) retryDetach(ctx context.Context) {
	pause := n.options.Limits.RetryFirst
	for {
		left := n.retryRound(ctx)
		var next <-chan time.Time
		if left > 0 {
			next = time.After(pause)
			pause = min(2*pause, n.options.Limits.RetryMost)
		} else {
			pause = n.options.Limits.RetryFirst
		}
		select {
		case <-ctx.Done():
			return
		case <-n.retry:
		case <-next:
		}
	}
}

func (n *CNI) retryRound(ctx context.Context) (left int) {
	for _, pending := range n.Pending() {
		if ctx.Err() != nil {
			return 0
		}
		if err := n.retryOne(ctx, pending.ID); err != nil {
			left++
			n.options.Logger.Warn("CNI DEL failed again", "sandbox", pending.ID, "network", pending.Network, "err", err)
		}
	}
	return left
}

func (n *CNI) retryOne(ctx context.Context, id string) error {
	a := n.find(id)
	if a == nil {
		return nil
	}
	unlock, err := n.lock(ctx, a)
	if err != nil {
		return err
	}
	defer unlock()
	if a.struck {
		return nil
	}
	if err := n.delete(ctx, a, n.NamespacePath(id)); err != nil {
		return err
	}
	n.options.Logger.Info("CNI DEL succeeded at last", "sandbox", id, "network", a.record.Network)
	// Kept for this DEL; the sandbox may be gone long since.
	return n.options.Namespaces.Remove(id)
}

// NamespacePath is the path of id's network namespace for CNI_NETNS: "" when
// it is not a namespace any more.
func (n *CNI) NamespacePath(id string) string {
	if n.options.Namespaces.Alive(id) {
		return n.options.Namespaces.Path(id)
	}
	return ""
}
