package stdio

import (
	"bytes"
	"sync"
)

// fanoutBacklog is how many chunks (pumpBuffer bytes at most) an attached
// client may be behind before it is dropped: the container never waits for it.
const fanoutBacklog = 32

// Fanout copies a container's output to attached clients.
type Fanout struct {
	mu      sync.Mutex
	clients map[chan []byte]bool
	ended   bool
}

func newFanout() *Fanout { return &Fanout{clients: map[chan []byte]bool{}} }

func (f *Fanout) emit(p []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for client := range f.clients {
		select {
		case client <- bytes.Clone(p):
		default:
			f.drop(client)
		}
	}
}

// Attach returns the output from now on; closed at its end, or when the client
// is too slow.
func (f *Fanout) Attach() chan []byte {
	client := make(chan []byte, fanoutBacklog)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		close(client)
		return client
	}
	f.clients[client] = true
	return client
}

// Detach ends what Attach returned.
func (f *Fanout) Detach(client chan []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop(client)
}

func (f *Fanout) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	for client := range f.clients {
		f.drop(client)
	}
}

// drop needs mu.
func (f *Fanout) drop(client chan []byte) {
	if f.clients[client] {
		delete(f.clients, client)
		close(client)
	}
}
