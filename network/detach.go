package network

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Detach runs DEL for the attachment of id, in the namespace at path, or with
// an empty CNI_NETNS when path is "". Where there is no attachment there is
// nothing to do. A DEL that fails is retried in the background from then on;
// Detach reports the failure until the limits DetachTries and DetachTime end
// that, and nil after that: the attachment then lives on in the journal and no
// longer blocks its pod's deletion.
func (n *CNI) Detach(ctx context.Context, id, path string) error {
	a := n.find(id)
	if a == nil {
		return nil
	}
	held, err := n.lock(ctx, a)
	if waiting := a.waiting.Load(); errors.Is(err, errStuck) && waiting != nil && n.detachTimeOver(*waiting) {
		return nil
	}
	if err != nil {
		return err
	}
	var o outcome
	defer func() { held.release(o) }()
	if a.removed || n.detachTimeOver(a.record) {
		return nil
	}
	a.record.Stops++ // with the failure, if it comes to that
	if o = n.delete(ctx, a, path); o.err == nil {
		n.retries.done(id)
		return nil
	}
	n.retries.later(id)
	if n.detachTimeOver(a.record) {
		n.options.Logger.Error("the pod is deleted without CNI DEL, which is retried in the background",
			"sandbox", id, "network", a.record.Network, "tries", a.record.Tries, "err", o.err)
		return nil
	}
	return o.err
}

// detachTimeOver reports whether a DEL that fails blocks its pod's deletion no
// longer. The tries of the background do not count: they are many.
func (n *CNI) detachTimeOver(a Attachment) bool {
	limits := n.limits.Load()
	return a.Tries > 0 && (a.Stops >= limits.DetachTries || time.Since(a.FirstFailure) >= limits.DetachTime)
}

// delete runs DEL and removes the attachment from the journal, or notes the
// failure; the attachment's lock is held.
func (n *CNI) delete(ctx context.Context, a *attachment, path string) outcome {
	o := n.plugins.del(ctx, a.record, path)
	switch {
	case o.err == nil:
		o.err = n.remove(a)
	case !errors.Is(o.err, errLeft):
		o.err = n.noteFailure(a, o.err)
	}
	return o
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
		n.options.Logger.Error("a failed DEL is not in the journal on disk", "sandbox", a.record.ID, "err", writeErr)
	}
	return fmt.Errorf("%w (try %d; it is retried in the background)", err, a.record.Tries)
}

// Release hands the attachment of id to the background: its DEL runs there,
// with an empty CNI_NETNS once the namespace is gone, until it succeeds.
// Release does not wait for a plugin that runs.
func (n *CNI) Release(id string) {
	a := n.find(id)
	if a == nil {
		return
	}
	a.released.Store(true)
	n.retries.now(id)
}

// Attached reports whether DEL is still to run for id. Until then its namespace
// has to stay: without it, plugins do not find all that they made outside of
// it (bridge leaves its masquerade rules behind).
func (n *CNI) Attached(id string) bool { return n.find(id) != nil }

// ReleaseUnknown releases the attachments of sandboxes that do not exist:
// what a daemon left that was killed between two writes.
func (n *CNI) ReleaseUnknown(exists func(id string) bool) {
	for _, id := range n.ids() {
		if !exists(id) {
			n.options.Logger.Info("an attachment has no sandbox: CNI DEL runs in the background", "sandbox", id)
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

// NamespacePath is the path of id's network namespace for CNI_NETNS: "" when
// it is not a namespace any more.
func (n *CNI) NamespacePath(id string) string {
	if n.options.Namespaces.Alive(id) {
		return n.options.Namespaces.Path(id)
	}
	return ""
}
