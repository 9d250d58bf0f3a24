package network

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// gcTimeout is how long a GC may hold up ADD, DEL and CHECK of its network. One
// that takes longer hangs, and they do not wait for its end.
const gcTimeout = 5 * time.Second

// gate keeps the garbage collection of a network and its other plugin runs
// apart: CNI GC must not overlap an ADD or DEL (CNI SPEC, "GC"). Collection
// waits for a moment when nothing runs, and nothing cuts it short.
type gate struct {
	mu sync.Mutex
	// inside are the runs that are under way or wait for a collection to be over, and
	// the collection. None begins beside them.
	inside int
	// collecting ends with the last collection, or gcTimeout after it has begun.
	collecting context.Context
}

// gate is the gate of a network.
func (n *CNI) gate(network string) *gate {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gates[network] == nil {
		n.gates[network] = newGate()
	}
	return n.gates[network]
}

func newGate() *gate {
	g := &gate{}
	g.begin()() // so that one is over
	return g
}

// enter waits for a collection to be over, or to hang. A second leave does nothing.
func (g *gate) enter(ctx context.Context) (leave func(), err error) {
	g.mu.Lock()
	g.inside++
	collecting := g.collecting
	g.mu.Unlock()
	leave = sync.OnceFunc(g.leave)
	select {
	case <-collecting.Done():
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		leave()
		return nil, fmt.Errorf("wait for CNI GC to end: %w", context.Cause(ctx))
	}
	return leave, nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
}

// collect waits until nothing runs, and calls f; runs that are to begin then
// wait. It reports false if the context ends first.
func (g *gate) collect(ctx context.Context, f func()) bool {
	end := g.begin()
	for ; end == nil; end = g.begin() {
		select {
		case <-time.After(firstLook):
		case <-ctx.Done():
			return false
		}
	}
	defer end()
	f()
	return true
}

// begin begins a collection if nothing is inside; else it returns nil.
func (g *gate) begin() (end func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside > 0 {
		return nil
	}
	g.inside++
	collecting, over := context.WithTimeout(context.Background(), gcTimeout)
	g.collecting = collecting
	return func() {
		over()
		g.leave()
	}
}
