package server

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// GetContainerEvents sends the events of pods and containers until the client leaves. It ends with
// ResourceExhausted if there are too many clients, or if this one is too slow and lost events.
func (r *Runtime) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	subscription, err := r.Events.Subscribe()
	if err != nil {
		return err
	}
	defer subscription.Cancel()
	for {
		event, err := subscription.Next(stream.Context())
		if stream.Context().Err() != nil {
			return nil // the client has left, which is how a stream ends
		}
		if err != nil {
			return err
		}
		if err := stream.Send(event); err != nil {
			return err
		}
	}
}

// SandboxEvent implements sandbox.Events; the caller holds the sandbox's lock.
func (r *Runtime) SandboxEvent(sb *sandbox.Sandbox, kind runtimeapi.ContainerEventType) {
	r.Events.Publish(sb.ID, kind, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) { return r.snapshot(sb) })
}

// ContainerEvent implements container.Events; the caller holds the container's lock.
func (r *Runtime) ContainerEvent(c *container.Container, kind runtimeapi.ContainerEventType) {
	r.Events.Publish(c.ID, kind, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
		sb, err := r.Sandboxes.Find(c.SandboxID)
		if err != nil {
			return nil, nil // no container outlives its sandbox; this one is being removed with it
		}
		return r.snapshot(sb)
	})
}

const (
	maxQueuedEvents  = 2048 // a consumer may be so far behind: some hundred pods at once
	maxQueuedBytes   = 16 << 20
	maxSubscriptions = 32 // a node has one kubelet, and a few people who look
)

// ErrOverflow ends the subscription of a consumer that is too slow.
var ErrOverflow = fmt.Errorf("events were lost: the consumer is more than %d events or %d MiB behind; list everything and subscribe again: %w", maxQueuedEvents, maxQueuedBytes>>20, errdefs.ErrResourceExhausted)

var errClosed = fmt.Errorf("no more events: minicri is shutting down: %w", errdefs.ErrUnavailable)

// Look returns a pod and its containers as they are at one moment. It must neither wait nor publish.
type Look func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus)

// Broadcaster sends every event to all subscriptions. The caller of Publish holds the lock of the changed
// object, so its events come in the order of its changes. Publish looks at the pod under mu, so a later
// event never shows an older pod. It never waits for a consumer: a subscription whose queue is full ends
// with ErrOverflow after what is queued, so the consumer knows that it missed something.
type Broadcaster struct {
	dropped atomic.Uint64

	mu            sync.Mutex // guards what follows; held while an event is made and queued
	subscriptions map[*Subscription]struct{}
	closed        bool
	last          int64 // the time of the last event or status, in nanoseconds since 1970
}

// NewBroadcaster makes a broadcaster without subscriptions.
func NewBroadcaster() *Broadcaster {
	return &Broadcaster{subscriptions: make(map[*Subscription]struct{})}
}

// Publish sends an event of the container or sandbox with the id. It does nothing without consumers.
func (b *Broadcaster) Publish(id string, kind runtimeapi.ContainerEventType, look Look) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.subscriptions) == 0 {
		return
	}
	// The time grows whatever the clock does. The pod is at least as new as it says.
	b.last = max(b.last+1, time.Now().UnixNano())
	event := &runtimeapi.ContainerEventResponse{ContainerId: id, ContainerEventType: kind, CreatedAt: b.last}
	event.PodSandboxStatus, event.ContainersStatuses = look()
	event = fit(event)
	size := int64(proto.Size(event))
	for s := range b.subscriptions {
		if !s.queue(event, size) {
			b.dropped.Add(1)
			b.end(s, ErrOverflow)
		}
	}
}

// Time is now, but not before the last event: the kubelet drops a status that is older than what it knows.
func (b *Broadcaster) Time() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = max(b.last, time.Now().UnixNano())
	return b.last
}

// Dropped counts the events that a consumer did not get because it was too slow.
func (b *Broadcaster) Dropped() uint64 { return b.dropped.Load() }

// end ends a subscription after what it has queued; the caller holds mu.
func (b *Broadcaster) end(s *Subscription, reason error) {
	if _, listens := b.subscriptions[s]; listens {
		delete(b.subscriptions, s)
		s.reason = reason
		close(s.events)
	}
}

// Subscribe subscribes to all events from now on, or fails with errdefs.ErrResourceExhausted.
func (b *Broadcaster) Subscribe() (*Subscription, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return nil, errClosed
	case len(b.subscriptions) >= maxSubscriptions:
		return nil, fmt.Errorf("%d clients listen to events already: %w", maxSubscriptions, errdefs.ErrResourceExhausted)
	}
	s := &Subscription{broadcaster: b, events: make(chan *runtimeapi.ContainerEventResponse, maxQueuedEvents)}
	b.subscriptions[s] = struct{}{}
	return s, nil
}

// Close ends all subscriptions, and refuses new ones.
func (b *Broadcaster) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for s := range b.subscriptions {
		b.end(s, errClosed)
	}
}

// Subscription belongs to one consumer, who has to cancel it.
type Subscription struct {
	broadcaster *Broadcaster
	events      chan *runtimeapi.ContainerEventResponse
	bytes       atomic.Int64 // of the events in the queue
	reason      error        // why it has ended, set before events is closed
}

// queue reports whether there was room. An empty queue has room for an event of any size.
func (s *Subscription) queue(event *runtimeapi.ContainerEventResponse, size int64) bool {
	if before := s.bytes.Load(); before > 0 && before+size > maxQueuedBytes {
		return false
	}
	select {
	case s.events <- event:
		s.bytes.Add(size)
		return true
	default:
		return false
	}
}

// Next returns the next event, or ErrOverflow, errdefs.ErrUnavailable at a shutdown, or the context's error.
func (s *Subscription) Next(ctx context.Context) (*runtimeapi.ContainerEventResponse, error) {
	select {
	case event, more := <-s.events:
		if !more {
			return nil, s.reason
		}
		s.bytes.Add(-int64(proto.Size(event)))
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
