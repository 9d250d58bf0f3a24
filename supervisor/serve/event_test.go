package serve

import (
	"fmt"
	"testing"

	"github.com/minicri/minicri/supervisor/api"
)

// A container that is killed for memory again and again, without a reader, hides
// no other container's end; numbers show that events are missing.
func TestNoticesOfOneContainerHideNoOther(t *testing.T) {
	b := newBroker()
	b.publish(api.EventKind_EVENT_EXITED, &api.Container{Id: "dies"})
	const notices = 760
	for range notices {
		b.publish(api.EventKind_EVENT_OOM, &api.Container{Id: "loops"})
	}
	events, _ := b.since(0)
	if len(events) != 2 || events[0].Container.Id != "dies" || events[0].Seq != 1 || events[1].Seq != notices+1 {
		t.Errorf("kept: %v", events)
	}
}

// The history is bounded: who missed more sees a gap.
func TestHistoryOfEventsIsBounded(t *testing.T) {
	b := newBroker()
	for i := range eventHistory + 10 {
		b.publish(api.EventKind_EVENT_CREATED, &api.Container{Id: fmt.Sprint(i)})
	}
	if events, _ := b.since(0); len(events) != eventHistory || events[0].Seq != 11 {
		t.Errorf("kept: %d events from number %d on", len(events), events[0].Seq)
	}
	if events, _ := b.since(eventHistory + 9); len(events) != 1 {
		t.Errorf("after the last but one: %v", events)
	}
}
