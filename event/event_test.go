package event

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT

func nothing() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) { return nil, nil }

func next(t *testing.T, s *Subscription) *runtimeapi.ContainerEventResponse {
	t.Helper()
	event, err := s.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return event
}

func TestEventsOfManyPublishersComeInOneOrder(t *testing.T) {
	b := New()
	subscriptions := []*Subscription{b.Subscribe(), b.Subscribe()}
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
			if event.GetCreatedAt() <= last.GetCreatedAt() || event.GetPodSandboxStatus().GetCreatedAt() != last.GetPodSandboxStatus().GetCreatedAt()+1 {
				t.Fatalf("%v comes after %v", event, last)
			}
			last = event
			var publisher, i int
			if _, err := fmt.Sscan(event.GetContainerId(), &publisher, &i); err != nil || i != of[publisher] {
				t.Fatalf("event %q comes when the next of its publisher is %d (%v)", event.GetContainerId(), of[publisher], err)
			}
			of[publisher]++
		}
	}
}

// Property 32: a stalled consumer stalls nobody, and sees that it missed events.
func TestConsumerThatDoesNotReadLosesItsStream(t *testing.T) {
	b := New()
	stalled, reading := b.Subscribe(), b.Subscribe()
	for i := range bufferSize + 10 {
		id := fmt.Sprint(i)
		b.Publish(id, created, nothing)
		if got := next(t, reading).GetContainerId(); got != id {
			t.Fatalf("who reads got %s, not %s", got, id)
		}
	}
	for i := range bufferSize {
		if got := next(t, stalled).GetContainerId(); got != fmt.Sprint(i) {
			t.Fatalf("who did not read got %s, not %d", got, i)
		}
	}
	for range 2 {
		if event, err := stalled.Next(t.Context()); !errors.Is(err, ErrOverflow) || !errdefs.IsResourceExhausted(err) {
			t.Errorf("after the gap come %v and %v", event, err)
		}
	}
	stalled.Cancel()
}

func TestNobodyListening(t *testing.T) {
	b := New()
	looked := false
	look := func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
		looked = true
		return nil, nil
	}
	b.Publish("a", created, look)
	s := b.Subscribe()
	s.Cancel()
	b.Publish("b", created, look)
	if looked {
		t.Error("a pod was looked at for nobody")
	}
	if _, err := s.Next(t.Context()); !errors.Is(err, context.Canceled) {
		t.Errorf("a subscription that was cancelled says %v", err)
	}
}

func TestCloseEndsSubscriptions(t *testing.T) {
	b := New()
	before := b.Subscribe()
	b.Publish("last", created, nothing)
	b.Close()
	b.Close()
	if got := next(t, before).GetContainerId(); got != "last" {
		t.Errorf("the last event is %q", got)
	}
	for _, s := range []*Subscription{before, b.Subscribe()} {
		if _, err := s.Next(t.Context()); !errdefs.IsUnavailable(err) {
			t.Errorf("after the end comes %v", err)
		}
		s.Cancel()
	}
}

func TestNextEndsWithItsContext(t *testing.T) {
	b := New()
	s := b.Subscribe()
	defer s.Cancel()
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the client has gone")
	cancel(gone)
	if _, err := s.Next(ctx); !errors.Is(err, gone) {
		t.Errorf("the error is %v", err)
	}
}

func TestTimesGoOnWhenTheClockJumpsBack(t *testing.T) {
	b := New()
	s := b.Subscribe()
	b.Publish("before", created, nothing)
	first := next(t, s)
	b.last = first.GetCreatedAt() + int64(1e12) // what a clock that was ahead left
	b.Publish("after", created, nothing)
	if got := next(t, s).GetCreatedAt(); got != first.GetCreatedAt()+int64(1e12)+1 {
		t.Errorf("the event has the time %d", got)
	}
}
