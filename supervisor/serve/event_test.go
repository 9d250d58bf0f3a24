package serve

import (
	"fmt"
	"testing"

	"github.com/minicri/minicri/supervisor/api"
)

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
