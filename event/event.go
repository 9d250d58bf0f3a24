// Package event tells what happens to pods and containers to whoever listens.
//
// It owns the subscriptions and the order of events. Whoever changes a pod or a
// container publishes the change while it holds that object's lock, so events
// of one object come in the order of its changes. A Broadcaster publishes one
// event at a time, and what the event shows of the pod is looked at then: of
// two events of a pod, the later one never shows an older pod.
//
// Nobody who publishes ever waits for a consumer. A subscription buffers
// bufferSize events; when it overflows it ends, with ErrOverflow after the
// events that were buffered, so a consumer that missed something knows it, and
// can list everything and subscribe again.
//
// # Locks
//
// Broadcaster.mu is held while an event is made and put into the buffers. The
// look is called under it, must not wait for anything, and must not publish.
package event

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// bufferSize is how many events a consumer may be late: those of some hundred
// pods that come or go at once.
const bufferSize = 2048

// ErrOverflow ends the subscription of a consumer that does not keep up.
var ErrOverflow = fmt.Errorf("events were lost: the consumer is more than %d behind; list everything and subscribe again: %w", bufferSize, errdefs.ErrResourceExhausted)

var errClosed = fmt.Errorf("no more events: minicri is shutting down: %w", errdefs.ErrUnavailable)

// Look shows the pod that an event is about, and its containers, as they are at
// one moment.
type Look func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus)

// Broadcaster gives every event to all subscriptions.
type Broadcaster struct {
	mu            sync.Mutex // guards all below
	subscriptions map[*Subscription]struct{}
	closed        bool
	// last is the time of the last event, in nanoseconds since 1970.
	last int64
}

// New makes a broadcaster that nobody has subscribed to.
func New() *Broadcaster { return &Broadcaster{subscriptions: make(map[*Subscription]struct{})} }

// Publish tells that something has happened to the container, or sandbox, with
// the id. It never waits for a consumer, and costs nothing if there is none.
func (b *Broadcaster) Publish(id string, kind runtimeapi.ContainerEventType, look Look) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.subscriptions) == 0 {
		return
	}
	// Taken before the look: what is shown is at least as new as the time says.
	event := &runtimeapi.ContainerEventResponse{ContainerId: id, ContainerEventType: kind, CreatedAt: b.now()}
	event.PodSandboxStatus, event.ContainersStatuses = look()
	for s := range b.subscriptions {
		select {
		case s.events <- event:
		default:
			b.end(s, ErrOverflow)
		}
	}
}

// now is later than the time of every event before, whatever the clock does;
// mu is held.
func (b *Broadcaster) now() int64 {
	b.last = max(b.last+1, time.Now().UnixNano())
	return b.last
}

// end lets a subscription end after what it has buffered; mu is held.
func (b *Broadcaster) end(s *Subscription, why error) {
	if _, listens := b.subscriptions[s]; !listens {
		return
	}
	delete(b.subscriptions, s)
	s.why = why
	close(s.events)
}

// Subscribe returns a subscription to all events from now on, which has to be
// cancelled.
func (b *Broadcaster) Subscribe() *Subscription {
	s := &Subscription{broadcaster: b, events: make(chan *runtimeapi.ContainerEventResponse, bufferSize)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.subscriptions[s] = struct{}{}
	if b.closed {
		b.end(s, errClosed)
	}
	return s
}

// Close ends all subscriptions, those that come later too.
func (b *Broadcaster) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for s := range b.subscriptions {
		b.end(s, errClosed)
	}
}

// Subscription is one consumer's.
type Subscription struct {
	broadcaster *Broadcaster
	events      chan *runtimeapi.ContainerEventResponse
	// why it has ended, set before events is closed.
	why error
}

// Next returns the next event. The error is ErrOverflow when events after the
// last one were lost, errdefs.ErrUnavailable at a shutdown, or the context's.
func (s *Subscription) Next(ctx context.Context) (*runtimeapi.ContainerEventResponse, error) {
	select {
	case event, more := <-s.events:
		if !more {
			return nil, s.why
		}
		return event, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Cancel ends the subscription.
func (s *Subscription) Cancel() {
	s.broadcaster.mu.Lock()
	defer s.broadcaster.mu.Unlock()
	s.broadcaster.end(s, context.Canceled)
}
