package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/minicri/minicri/internal/step"
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
	if a.removed {
		return nil
	}
	if a.record.Releasing && n.isGivenUp(a) {
		o.err = n.drop(a)
		return o.err
	}
	if n.detachTimeOver(a.record) {
		return nil
	}
	a.record.Stops++ // with the failure, if it comes to that
	if o = n.delete(ctx, a, path); o.err == nil {
		n.retries.done(id)
		return nil
	}
	n.retries.later(id)
	if n.detachTimeOver(a.record) {
		a.record.logger(n.options.Logger).Error("the pod is deleted without CNI DEL, which is retried in the background",
			"tries", a.record.Tries, "err", o.err)
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
	if !a.begun {
		return outcome{err: n.remove(a)}
	}
	o := n.plugins.del(ctx, a.record, path)
	if o.err != nil && o.stuck == nil && a.record.NeverAttached && !errors.Is(o.err, errLeft) {
		o = n.deleteAsOfNow(ctx, a, path, o)
	}
	switch {
	case o.err == nil:
		o.err = n.remove(a)
	case errors.Is(o.err, errLeft):
	case o.stuck == nil && n.undoingIsOver(a.record):
		o.gaveUp, o.err = true, n.giveUp(ctx, a, o.err)
	default:
		o.err = n.noteFailure(a, o.err)
	}
	return o
}

// deleteAsOfNow is for an attachment that never was and whose DEL has failed with the
// configuration of its ADD: what was wrong with that may have been corrected since.
func (n *CNI) deleteAsOfNow(ctx context.Context, a *attachment, path string, before outcome) outcome {
	for _, d := range n.directories() {
		now, err := d.Configuration()
		if err != nil || now.Name != a.record.Network || bytes.Equal(now.Bytes, a.record.Config) {
			continue
		}
		record := a.record
		record.Config = now.Bytes
		if o := n.plugins.del(ctx, record, path); o.err == nil || o.stuck != nil {
			return o
		}
	}
	return before
}

// undoingIsOver reports whether an attachment whose DEL has failed once more is given
// up: only one whose ADD never succeeded is.
func (n *CNI) undoingIsOver(a Attachment) bool {
	limits := n.limits.Load()
	return a.NeverAttached && (a.Tries+1 >= limits.GiveUpTries || a.Tries > 0 && time.Since(a.FirstFailure) >= limits.GiveUpTime)
}

// giveUp removes an attachment whose ADD never succeeded and whose DEL does not either:
// its entry, and its namespace.
func (n *CNI) giveUp(ctx context.Context, a *attachment, reason error) error {
	err := n.remove(a)
	if err == nil {
		err = n.options.Namespaces.Remove(a.record.ID)
	}
	if err != nil {
		return errors.Join(reason, err)
	}
	left := fmt.Sprintf("its CNI ADD never succeeded, and its DEL failed %d times: what plugins of network %q keep for this id outside of its namespace, such as an address, may be left",
		a.record.Tries+1, a.record.Network)
	a.record.logger(n.options.Logger).Error("an attachment is given up: "+left, "err", reason)
	n.tell(ctx, a.record.ID, step.Row{Kind: "pod", Step: "give up attachment", Start: time.Now(), Error: left + ": " + reason.Error()})
	return nil
}

// tell adds a row to the timeline of a sandbox, which the context has while the sandbox
// is there.
func (n *CNI) tell(ctx context.Context, id string, row step.Row) {
	if !step.Record(ctx, row) && n.options.Later != nil {
		n.options.Later(id, row)
	}
}

func (n *CNI) noteFailure(a *attachment, err error) error {
	if a.record.Tries == 0 {
		a.record.FirstFailure = time.Now()
	}
	a.record.Releasing = true
	a.record.Tries++
	a.record.LastError = err.Error()
	a.show()
	writeErr := n.journal.Update(a.record.ID, a.record)
	if n.isGivenUp(a) {
		return fmt.Errorf("%w (try %d, the last: it was given up by hand)", err, a.record.Tries)
	}
	if writeErr != nil {
		a.record.logger(n.options.Logger).Error("a failed DEL is not in the journal on disk", "err", writeErr)
	}
	return fmt.Errorf("%w (try %d; it is retried in the background)", err, a.record.Tries)
}

// isGivenUp reports whether a person has removed the attachment's entry while it waits
// for its DEL (minicri check --fix --force ID). One whose entry could not be written, on a
// full disk, is not given up.
func (n *CNI) isGivenUp(a *attachment) bool {
	if a.unwritten {
		return false
	}
	_, err := os.Lstat(n.journal.Path(a.record.ID))
	return errors.Is(err, fs.ErrNotExist)
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
			if a := n.find(id); a != nil {
				a.record.logger(n.options.Logger).Info("an attachment has no sandbox: CNI DEL runs in the background")
			}
			n.Release(id)
		}
	}
}

func (n *CNI) ids() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Keys(n.attachments))
}

// NamespacePath is the path of id's network namespace for CNI_NETNS: "" when
// it is not a namespace any more.
func (n *CNI) NamespacePath(id string) string {
	if n.options.Namespaces.Alive(id) {
		return n.options.Namespaces.Path(id)
	}
	return ""
}
