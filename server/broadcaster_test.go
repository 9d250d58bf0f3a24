package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT

func nothing() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) { return nil, nil }

func subscribed(t *testing.T, b *Broadcaster) *Subscription {
	s, err := b.Subscribe()
	must(t, err)
	return s
}

func next(t *testing.T, s *Subscription) *runtimeapi.ContainerEventResponse {
	event, err := s.Next(t.Context())
	must(t, err)
	return event
}

func TestEventsOfManyPublishersComeInOneOrder(t *testing.T) {
	b := NewBroadcaster()
	subscriptions := []*Subscription{subscribed(t, b), subscribed(t, b)}
	const publishers, each = 8, 100
	state := int64(0) // of the pod; guarded by the broadcaster, as looks are
	look := func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
		state++
		return &runtimeapi.PodSandboxStatus{CreatedAt: state}, nil
	}
	var publishing sync.WaitGroup
	for publisher := range publishers {
		publishing.Go(func() {
			for i := range each {
				b.Publish(fmt.Sprintf("%d %d", publisher, i), created, look)
			}
		})
	}
	publishing.Wait()
	for _, s := range subscriptions {
		last, of := &runtimeapi.ContainerEventResponse{PodSandboxStatus: &runtimeapi.PodSandboxStatus{}}, make(map[int]int)
		for range publishers * each {
			event := next(t, s)
			harness.Need(t, event.GetCreatedAt() > last.GetCreatedAt() &&
				event.GetPodSandboxStatus().GetCreatedAt() == last.GetPodSandboxStatus().GetCreatedAt()+1, "%v comes after %v", event, last)
			last = event
			var publisher, i int
			if _, err := fmt.Sscan(event.GetContainerId(), &publisher, &i); err != nil || i != of[publisher] {
				t.Fatalf("event %q comes when the next of its publisher is %d (%v)", event.GetContainerId(), of[publisher], err)
			}
			of[publisher]++
		}
	}
}

// Property 32: a stalled consumer stalls no other, and sees that it missed events.
func TestConsumerThatDoesNotReadLosesItsStream(t *testing.T) {
	b := NewBroadcaster()
	stalled, reading := subscribed(t, b), subscribed(t, b)
	for i := range maxQueuedEvents + 10 {
		id := fmt.Sprint(i)
		b.Publish(id, created, nothing)
		got := next(t, reading).GetContainerId()
		harness.Need(t, got == id, "who reads got %s, not %s", got, id)
	}
	for i := range maxQueuedEvents {
		got := next(t, stalled).GetContainerId()
		harness.Need(t, got == fmt.Sprint(i), "who did not read got %s, not %d", got, i)
	}
	for range 2 {
		event, err := stalled.Next(t.Context())
		harness.Want(t, errors.Is(err, ErrOverflow) && errdefs.IsResourceExhausted(err), "after the gap come %v and %v", event, err)
	}
	stalled.Cancel()
}

func TestCloseEndsSubscriptions(t *testing.T) {
	b := NewBroadcaster()
	b.Publish("nobody", created, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
		t.Error("a pod was looked at without a subscriber")
		return nil, nil
	})
	before, cancelled := subscribed(t, b), subscribed(t, b)
	cancelled.Cancel()
	_, err := cancelled.Next(t.Context())
	harness.Want(t, errors.Is(err, context.Canceled), "a subscription that was cancelled says %v", err)
	b.Publish("last", created, nothing)
	b.Close()
	b.Close()
	harness.Same(t, "the last event", next(t, before).GetContainerId(), "last")
	_, err = before.Next(t.Context())
	harness.Want(t, errdefs.IsUnavailable(err), "after the end comes %v", err)
	before.Cancel()
	_, err = b.Subscribe()
	harness.Want(t, errdefs.IsUnavailable(err), "a subscription after the end: %v", err)
}

func TestTimesGoOnWhenTheClockJumpsBack(t *testing.T) {
	b := NewBroadcaster()
	s := subscribed(t, b)
	b.Publish("before", created, nothing)
	first := next(t, s)
	b.last = first.GetCreatedAt() + int64(1e12) // what a clock that was ahead left
	b.Publish("after", created, nothing)
	harness.Same(t, "the event has the time", next(t, s).GetCreatedAt(), first.GetCreatedAt()+int64(1e12)+1)
	harness.Same(t, "a status then", b.Time(), b.last)
}

// The number of consumers is bounded, and one that has left makes room.
func TestSubscriptionsAreBounded(t *testing.T) {
	b := NewBroadcaster()
	var last *Subscription
	for range maxSubscriptions {
		last = subscribed(t, b)
	}
	_, err := b.Subscribe()
	harness.Want(t, errdefs.IsResourceExhausted(err), "one more than %d: %v", maxSubscriptions, err)
	last.Cancel()
	subscribed(t, b)
}

// What a consumer may hold is bounded in bytes too: events of pods with large annotations end a consumer that does
// not read long before their number does, and one that reads gets an event as large as they come.
func TestQueuedBytesAreBounded(t *testing.T) {
	b := NewBroadcaster()
	stalled, reading := subscribed(t, b), subscribed(t, b)
	publish := func(size int) {
		b.Publish("large", created, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
			return &runtimeapi.PodSandboxStatus{Annotations: map[string]string{"note": strings.Repeat("x", size)}}, nil
		})
		next(t, reading)
	}
	publish(maxAnswer - 1<<10)
	publish(maxQueuedBytes - maxAnswer + 1<<10)
	next(t, stalled)
	harness.Want(t, stalled.bytes.Load() == 0, "an empty queue holds %d bytes", stalled.bytes.Load())
	_, err := stalled.Next(t.Context())
	harness.Want(t, errors.Is(err, ErrOverflow), "after more than %d bytes comes %v", maxQueuedBytes, err)
}
