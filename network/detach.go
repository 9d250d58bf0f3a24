package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/minicri/minicri/internal/step"
)

// Detach runs DEL for the attachment of id, if there is one, in the namespace at path, or with an empty
// CNI_NETNS if path is "". A failed DEL is then retried in the background; Detach reports the failure until
// DetachTries or DetachTime is reached, and returns nil from then on so that the pod can be deleted.
func (n *CNI) Detach(ctx context.Context, id, path string) error {
	a := n.find(id)
	if a == nil {
		return nil
	}
	h, err := n.lock(ctx, a)
	if errors.Is(err, errStuck) && n.leaves(ctx, a) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.release()
	if !a.removed && a.record.Releasing && n.isGivenUp(a) {
		return n.drop(a)
	}
	if a.removed || n.leaves(ctx, a) {
		return nil
	}
	n.change(a, func(r *Attachment) { r.Stops++ }) // DEL's failure, if any, writes it to the disk
	if _, err = n.delete(ctx, h, path, true); err == nil {
		return nil
	}
	n.repeat(a, false)
	if n.leaves(ctx, a) {
		a.record.logger(n.options.Logger).Error("the pod is deleted without CNI DEL, which is retried in the background",
			"tries", a.record.Tries, "err", err)
		return nil
	}
	return err
}

// leaves reports whether the pod may be deleted although DEL fails, and notes that in its timeline.
func (n *CNI) leaves(ctx context.Context, a *attachment) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	limits, r := n.limits.Load(), &a.record
	if r.FirstFailure.IsZero() || r.Stops < limits.DetachTries && time.Since(r.FirstFailure) < limits.DetachTime {
		return false
	}
	step.Record(ctx, step.Row{Kind: "pod", Step: "left to the background", Start: time.Now(), Error: r.LastError})
	return true
}

// delete runs DEL and removes the attachment, or notes the failure, or gives up. Only a DEL that counts does: one that
// was brought forward, because something may have been corrected, says nothing of how long that may take.
func (n *CNI) delete(ctx context.Context, h *locked, path string, counts bool) (gaveUp bool, err error) {
	a := h.attachment
	if !a.begun {
		return false, n.remove(a)
	}
	err = n.del(ctx, h, a.record, path)
	if err != nil && h.keep == nil && a.record.NeverAttached {
		err = n.deleteAsOfNow(ctx, h, path, err)
	}
	limits, r := n.limits.Load(), a.record
	began := r.FirstFailure
	if began.IsZero() {
		began = time.Now()
	}
	last := counts && r.Tries+1 >= limits.GiveUpTries && time.Since(began) >= limits.GiveUpTime
	switch {
	case err == nil:
		return false, n.remove(a)
	case errors.Is(err, errLeft):
		return false, err
	case last && r.NeverAttached && h.keep == nil:
		return true, n.giveUp(ctx, a, err)
	}
	return false, n.noteFailure(a, err, counts)
}

// deleteAsOfNow repeats a failed DEL with the configuration of now, which may have been corrected since.
func (n *CNI) deleteAsOfNow(ctx context.Context, h *locked, path string, before error) error {
	for _, d := range n.directories() {
		now, err := d.Configuration()
		if err != nil || now.Name != h.record.Network || bytes.Equal(now.Bytes, h.record.Config) {
			continue
		}
		record := h.record
		record.Config = now.Bytes
		if err := n.del(ctx, h, record, path); err == nil || h.keep != nil {
			return err
		}
	}
	return before
}

// giveUp removes an attachment whose ADD never succeeded and whose DEL keeps failing. The caller removes its namespace.
func (n *CNI) giveUp(ctx context.Context, a *attachment, reason error) error {
	if err := n.remove(a); err != nil {
		return errors.Join(reason, err)
	}
	left := fmt.Sprintf("its CNI ADD never succeeded, and its DEL failed %d times: what plugins of network %q keep for this id outside of its namespace, such as an address, may be left",
		a.record.Tries+1, a.record.Network)
	a.record.logger(n.options.Logger).Error("an attachment is given up: "+left, "err", reason)
	row := step.Row{Kind: "pod", Step: "give up attachment", Start: time.Now(), Error: left + ": " + reason.Error()}
	if !step.Record(ctx, row) && n.options.Later != nil { // the context has a timeline while the sandbox is there
		n.options.Later(a.record.ID, row)
	}
	return nil
}

func (n *CNI) noteFailure(a *attachment, err error, counts bool) error {
	n.change(a, func(r *Attachment) {
		if r.FirstFailure.IsZero() {
			r.FirstFailure = time.Now()
		}
		r.Releasing, r.LastError = true, err.Error()
		if counts {
			r.Tries++
		}
	})
	writeErr := n.journal.Update(a.record.ID, a.record)
	if n.isGivenUp(a) {
		return fmt.Errorf("%w (try %d, the last: it was given up by hand)", err, a.record.Tries)
	}
	if writeErr != nil {
		a.record.logger(n.options.Logger).Error("a failed DEL is not in the journal on disk", "err", writeErr)
	}
	return fmt.Errorf("%w (try %d; it is retried in the background)", err, a.record.Tries)
}

// isGivenUp reports whether a person has removed the entry of an attachment that waits for its DEL (minicri
// check --fix --force ID). An entry that could not be written, on a full disk, does not count.
func (n *CNI) isGivenUp(a *attachment) bool {
	_, err := os.Lstat(n.journal.Path(a.record.ID))
	return !a.unwritten && errors.Is(err, fs.ErrNotExist)
}

func (n *CNI) drop(a *attachment) error {
	a.record.logger(n.options.Logger).Warn("an attachment was given up by hand: what its plugins keep for this id may be left")
	return errors.Join(os.RemoveAll(n.cachePath(a.record)), n.remove(a), n.options.Namespaces.Remove(a.record.ID))
}

// Release hands the attachment of id to the background, which runs DEL until it succeeds, with an empty
// CNI_NETNS once the namespace is gone. It does not wait for a running plugin.
func (n *CNI) Release(id string) {
	if a := n.find(id); a != nil {
		a.released.Store(true)
		n.repeat(a, true)
	}
}

// Attached reports whether DEL is still to run for id. The namespace has to stay until then: without it,
// plugins miss things that they made outside of it (bridge leaves its masquerade rules behind).
func (n *CNI) Attached(id string) bool { return n.find(id) != nil }

// ReleaseUnknown releases attachments without a sandbox, which a daemon killed between two writes leaves.
func (n *CNI) ReleaseUnknown(exists func(id string) bool) {
	for _, id := range n.ids() {
		if a := n.find(id); a != nil && !exists(id) {
			a.record.logger(n.options.Logger).Info("an attachment has no sandbox: CNI DEL runs in the background")
			n.Release(id)
		}
	}
}

func (n *CNI) ids() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Keys(n.attachments))
}

// NamespacePath returns id's network namespace for CNI_NETNS, or "" if there is none any more.
func (n *CNI) NamespacePath(id string) string {
	if n.options.Namespaces.Alive(id) {
		return n.options.Namespaces.Path(id)
	}
	return ""
}

// pathAsAdded returns the path of a namespace as ADD got it: plugins compare CNI_NETNS with the result of ADD, and a
// daemon may spell the directory in another way than the one before.
func (n *CNI) pathAsAdded(a Attachment, path string) string {
	var cached struct {
		Result struct{ Interfaces []struct{ Sandbox string } }
	}
	data, err := os.ReadFile(n.cachePath(a))
	if err != nil || path == "" || json.Unmarshal(data, &cached) != nil {
		return path
	}
	is, err := os.Stat(path)
	for _, in := range cached.Result.Interfaces {
		if in.Sandbox == "" || in.Sandbox == path || filepath.Base(in.Sandbox) != filepath.Base(path) {
			continue
		}
		if was, wasErr := os.Stat(in.Sandbox); err == nil && wasErr == nil && os.SameFile(was, is) {
			return in.Sandbox
		}
	}
	return path
}

// atOnce is how many DELs run in the background at once.
const atOnce = 16

// repeat has the background run DEL until the attachment is gone, if hurried the first at once. It does so once.
func (n *CNI) repeat(a *attachment, hurried bool) {
	if a.repeated.Swap(true) {
		return
	}
	if hurried {
		notify(a.hurried)
	}
	n.inBackground(func() {
		for pauses := 0; n.base.Err() == nil && n.find(a.record.ID) == a; {
			pauses = n.awaitTry(a, pauses)
			n.deleteLater(a, !a.early.Swap(false))
		}
	})
}

// hurryAll brings the next DELs forward. They do not count, and do not change when the others are due.
func (n *CNI) hurryAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range n.attachments {
		a.early.Store(true)
		notify(a.hurried)
	}
}

// awaitTry waits for the next DEL's time or until a person gives up, and counts the pause; a hurried one counts anew,
// unless it was brought forward. Limits may change meanwhile.
func (n *CNI) awaitTry(a *attachment, pauses int) int {
	for began := time.Now(); ; {
		limits := n.limits.Load()
		due := began.Add(min(limits.RetryFirst<<min(pauses, 16), limits.RetryMost))
		n.mu.Lock()
		end, r := a.record.FirstFailure.Add(limits.GiveUpTime), a.record
		if r.NeverAttached && r.Tries+1 >= limits.GiveUpTries && end.After(began) && end.Before(due) {
			due = end
		}
		n.mu.Unlock()
		select {
		case <-n.base.Done():
			return pauses
		case <-a.hurried:
			if a.early.Load() {
				return pauses
			}
			return 0
		case <-time.After(min(time.Until(due), givenUpPoll)):
		}
		if !time.Now().Before(due) || n.isGivenUp(a) {
			return pauses + 1
		}
	}
}

// outage counts the failed DELs of a network, and reports whether they are to be logged: one line in outagePause stands
// for all attachments, which mostly fail for one reason.
func (n *CNI) outage(network string) (failures int, say bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	o := n.outages[network]
	if o == nil {
		o = &outage{}
		n.outages[network] = o
	}
	o.failures++
	if time.Since(o.said) < outagePause {
		return 0, false
	}
	failures, o.failures, o.said = o.failures, 0, time.Now()
	return failures, true
}

// outage is what is known of a network's failed DELs: how many there were since the last line of the log.
type outage struct {
	failures int
	said     time.Time
}

// deleteLater runs one DEL of the background, unless a plugin already runs for the attachment.
func (n *CNI) deleteLater(a *attachment, counts bool) {
	if n.slots.Acquire(n.base, 1) != nil {
		return
	}
	defer n.slots.Release(1)
	if !a.lock.tryAcquire() {
		return
	}
	h, err := n.enter(n.base, a)
	if err != nil {
		return
	}
	defer h.release()
	logger := a.record.logger(n.options.Logger)
	if a.removed {
		return
	}
	if n.isGivenUp(a) {
		if err := n.drop(a); err != nil {
			logger.Error("an attachment that was given up stays", "err", err)
		}
		return
	}
	began, id := time.Now(), a.record.ID
	// A daemon that ends leaves the run to the next one.
	gaveUp, err := n.delete(context.WithoutCancel(n.base), h, n.NamespacePath(id), counts)
	if !a.removed {
		if failures, say := n.outage(a.record.Network); say {
			logger.Warn("CNI DEL failed again", "err", err, "failures_of_network", failures)
		}
		return
	}
	// The namespace was kept for this DEL; the sandbox may be long gone.
	if err := n.options.Namespaces.Remove(id); err != nil {
		logger.Error("the network namespace of a removed attachment stays", "err", err)
	}
	if gaveUp {
		return
	}
	logger.Info("CNI DEL succeeded after retries")
	if n.options.Later != nil {
		n.options.Later(id, step.Row{Kind: "pod", Step: "cni del", Start: began, Took: time.Since(began)})
	}
}
