package network

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
)

// gcTimeout is how long ADD, DEL and CHECK wait for a GC of their network. One
// that takes longer hangs, and they do not wait for its end.
const gcTimeout = 5 * time.Second

// gate keeps the garbage collection of a network and its other plugin runs
// apart: CNI GC must not overlap an ADD or DEL (CNI SPEC, "GC"). Collection
// waits for a moment when nothing runs, and nothing cuts it short.
type gate struct {
	// places are one for each run; a collection takes all.
	places *semaphore.Weighted
	// hangs is set while a collection is under way that was waited for in vain.
	hangs atomic.Bool
}

const allPlaces = math.MaxInt64

// gate is the gate of a network.
func (n *CNI) gate(network string) *gate {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gates[network] == nil {
		n.gates[network] = newGate()
	}
	return n.gates[network]
}

func newGate() *gate { return &gate{places: semaphore.NewWeighted(allPlaces)} }

// enter waits for a collection to be over, for gcTimeout at most. A second leave does
// nothing.
func (g *gate) enter(ctx context.Context) (leave func(), err error) {
	if g.hangs.Load() {
		return func() {}, nil
	}
	within, cancel := context.WithTimeout(ctx, gcTimeout)
	defer cancel()
	switch {
	case g.places.Acquire(within, 1) == nil:
		return sync.OnceFunc(func() { g.places.Release(1) }), nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("wait for CNI GC to end: %w", context.Cause(ctx))
	}
	g.hangs.Store(true)
	return func() {}, nil
}

// collect waits until nothing runs, and calls f; runs that are to begin then
// wait. It reports false if the context ends first.
func (g *gate) collect(ctx context.Context, f func()) bool {
	for !g.places.TryAcquire(allPlaces) {
		select {
		case <-time.After(firstLook):
		case <-ctx.Done():
			return false
		}
	}
	f()
	g.hangs.Store(false)
	g.places.Release(allPlaces)
	return true
}
