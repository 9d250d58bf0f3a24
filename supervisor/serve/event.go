package serve

import (
	"context"
	"sync"
	"time"

	"github.com/minicri/minicri/supervisor/api"
)

// eventHistory is how many events are kept for a client that comes back.
const eventHistory = 256

// broker numbers events and keeps the last ones. Readers pull: one that does not read
// holds up no other, and sees by the numbers what it missed.
type broker struct {
	mu      sync.Mutex
	last    uint64
	history []*api.Event
	changed chan struct{} // closed and replaced at each event
}

func newBroker() *broker {
	return &broker{changed: make(chan struct{})}
}

func (b *broker) publish(kind api.EventKind, c *api.Container) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last++
	b.history = append(b.history, &api.Event{Seq: b.last, Kind: kind, At: time.Now().UnixNano(), Container: c})
	if len(b.history) > eventHistory {
		b.history = append([]*api.Event(nil), b.history[1:]...)
	}
	close(b.changed)
	b.changed = make(chan struct{})
}

// since returns the kept events after seq, and what closes at the next one.
func (b *broker) since(seq uint64) ([]*api.Event, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, e := range b.history {
		if e.Seq > seq {
			return append([]*api.Event(nil), b.history[i:]...), b.changed
		}
	}
	return nil, b.changed
}

// stream sends events until ctx ends or send fails.
func (b *broker) stream(ctx context.Context, seq uint64, send func(*api.Event) error) error {
	for {
		events, changed := b.since(seq)
		for _, e := range events {
			if err := send(e); err != nil {
				return err
			}
			seq = e.Seq
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}
