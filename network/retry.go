package network

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/minicri/minicri/internal/step"
)

// atOnce is how many DELs the background runs side by side.
const atOnce = 16

// retries are the DELs that the background is to run, each at its own time.
type retries struct {
	first, most time.Duration

	mu   sync.Mutex
	byID map[string]*retry
	// changed wakes the background: there may be something to do.
	changed chan struct{}
}

// retry is the next DEL of one attachment.
type retry struct {
	next time.Time
	// pause before the try after the next one.
	pause   time.Duration
	running bool
}

func newRetries(limits Limits) retries {
	return retries{first: limits.RetryFirst, most: limits.RetryMost, byID: make(map[string]*retry), changed: make(chan struct{}, 1)}
}

// setPauses has other pauses from now on; no DEL waits longer than the new ones
// say.
func (r *retries) setPauses(first, most time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.first, r.most = first, most
	latest := time.Now().Add(most)
	for _, retry := range r.byID {
		retry.pause = min(retry.pause, most)
		if retry.next.After(latest) {
			retry.next = latest
		}
	}
	r.wake()
}

func (r *retries) wake() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// now has the DEL of id tried at once, unless one runs or has failed already:
// its next one has its own time.
func (r *retries) now(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID[id] == nil {
		r.byID[id] = &retry{next: time.Now(), pause: r.first}
		r.wake()
	}
}

// later has the DEL of id tried after the first pause, if the background does
// not try it already: that a caller's DEL failed changes nothing for it.
func (r *retries) later(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID[id] == nil {
		r.byID[id] = &retry{next: time.Now().Add(r.first), pause: min(2*r.first, r.most)}
		r.wake()
	}
}

// all has every DEL that waits tried now: the network is back.
func (r *retries) all() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, retry := range r.byID {
		retry.next, retry.pause = time.Now(), r.first
	}
	r.wake()
}

// take takes the DEL that is due, "" if none is or enough of them run; then
// wait is how long it takes until one is.
func (r *retries) take() (id string, wait time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	running := 0
	wait = time.Hour
	for candidate, retry := range r.byID {
		if retry.running {
			running++
			continue
		}
		if left := time.Until(retry.next); left < wait {
			id, wait = candidate, left
		}
	}
	if running >= atOnce {
		return "", time.Hour
	}
	if id == "" || wait > 0 {
		return "", wait
	}
	r.byID[id].running = true
	return id, 0
}

// gaveUp notes a try that could not be made.
func (r *retries) gaveUp(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byID[id].running = false
	r.byID[id].next = time.Now().Add(r.first)
	r.wake()
}

// failed notes a try that failed.
func (r *retries) failed(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	retry := r.byID[id]
	retry.running = false
	retry.next = time.Now().Add(retry.pause)
	retry.pause = min(2*retry.pause, r.most)
	r.wake()
}

// at has the next DEL of id tried at a time, unless it is to be tried before that.
func (r *retries) at(id string, when time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if retry := r.byID[id]; retry != nil && !retry.running && retry.next.After(when) {
		retry.next = when
		r.wake()
	}
}

// done forgets an attachment that has none to run any more.
func (r *retries) done(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byID, id)
	r.wake()
}

// retryDetach runs the DELs of the background, until the context ends.
func (n *CNI) retryDetach(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	for ctx.Err() == nil {
		id, wait := n.retries.take()
		if id != "" {
			running.Go(func() { n.retryOne(ctx, id) })
			continue
		}
		select {
		case <-ctx.Done():
		case <-n.retries.changed:
		case <-time.After(min(wait, givenUpPeriod)):
			n.hurryGivenUp()
		}
	}
}

// givenUpPeriod is how soon it is seen that a person has given an attachment up.
const givenUpPeriod = 2 * time.Second

// hurryGivenUp has the attachments dropped that were given up and wait for a DEL.
func (n *CNI) hurryGivenUp() {
	for _, pending := range n.Pending() {
		if a := n.find(pending.ID); a != nil && n.isGivenUp(a) {
			n.retries.at(pending.ID, time.Now())
		}
	}
}

// retryOne runs the DEL of one attachment, unless plugins run for it now.
func (n *CNI) retryOne(ctx context.Context, id string) {
	a := n.find(id)
	if a == nil {
		n.retries.done(id)
		return
	}
	held, err := n.tryLock(ctx, a)
	if err != nil {
		n.retries.gaveUp(id)
		return
	}
	began := time.Now()
	var o outcome
	defer func() { held.release(o) }()
	if a.removed {
		n.retries.done(id)
		return
	}
	if n.isGivenUp(a) {
		o.err = n.drop(a)
		return
	}
	// A daemon that ends leaves the run to the next one, and does not cut it.
	o = n.delete(context.WithoutCancel(ctx), a, n.NamespacePath(id))
	if !a.removed {
		n.retries.failed(id)
		if end := a.record.FirstFailure.Add(n.limits.Load().GiveUpTime); a.record.NeverAttached && end.After(time.Now()) {
			n.retries.at(id, end)
		}
		a.record.logger(n.options.Logger).Warn("CNI DEL failed again", "err", o.err)
		return
	}
	n.retries.done(id)
	if o.gaveUp {
		return
	}
	// Kept for this DEL; the sandbox may be gone long since.
	if err := n.options.Namespaces.Remove(id); err != nil {
		a.record.logger(n.options.Logger).Error("the network namespace of a removed attachment stays", "err", err)
	}
	a.record.logger(n.options.Logger).Info("CNI DEL succeeded after retries")
	n.tell(ctx, id, step.Row{Kind: "pod", Step: "cni del", Start: began, Took: time.Since(began)})
}

// drop forgets an attachment that a person has given up.
func (n *CNI) drop(a *attachment) error {
	n.retries.done(a.record.ID)
	a.record.logger(n.options.Logger).Warn("an attachment was given up by hand: what its plugins keep for this id may be left")
	cached := os.Remove(cachePath(a.record.Network, a.record.ID))
	if errors.Is(cached, fs.ErrNotExist) {
		cached = nil
	}
	return errors.Join(cached, n.remove(a), n.options.Namespaces.Remove(a.record.ID))
}
