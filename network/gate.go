package network

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// gcTimeout is how long ADD, DEL and CHECK wait for a GC of their network. One
// that takes longer hangs, and they do not wait for its end.
const gcTimeout = 5 * time.Second

// gate keeps the garbage collection of a network and its other plugin runs
// apart: CNI GC must not overlap an ADD or DEL (CNI SPEC, "GC"). Collection
// waits for a moment when nothing runs, and nothing cuts it short.
type gate struct {
	mu      sync.Mutex
	running int
	// quiet is closed when nothing runs any more, nil if nothing waits for it.
	quiet chan struct{}
	// collecting is closed when the collection under way is over, nil if there
	// is none; began is when it did.
	collecting chan struct{}
	began      time.Time
}

// gate is the gate of a network.
func (n *CNI) gate(network string) *gate {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gates[network] == nil {
		n.gates[network] = &gate{}
	}
	return n.gates[network]
}

// enter waits for a collection to be over, for gcTimeout at most.
func (g *gate) enter(ctx context.Context) error {
	for {
		g.mu.Lock()
		left := gcTimeout - time.Since(g.began)
		if g.collecting == nil || left <= 0 {
			g.running++
			g.mu.Unlock()
			return nil
		}
		over := g.collecting
		g.mu.Unlock()
		select {
		case <-over:
		case <-time.After(left):
		case <-ctx.Done():
			return fmt.Errorf("wait for CNI GC to end: %w", context.Cause(ctx))
		}
	}
}

// begin counts a run that is under way already.
func (g *gate) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running++
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	if g.running == 0 && g.quiet != nil {
		close(g.quiet)
		g.quiet = nil
	}
}

// collect waits until nothing runs, and calls f; runs that are to begin then
// wait. It reports false if the context ends first.
func (g *gate) collect(ctx context.Context, f func()) bool {
	for {
		g.mu.Lock()
		wait := g.collecting
		if wait == nil && g.running > 0 {
			if g.quiet == nil {
				g.quiet = make(chan struct{})
			}
			wait = g.quiet
		}
		if wait == nil {
			over := g.occupyLocked()
			g.mu.Unlock()
			defer over()
			f()
			return true
		}
		g.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return false
		}
	}
}

func (g *gate) occupyLocked() (over func()) {
	done := make(chan struct{})
	g.collecting, g.began = done, time.Now()
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.collecting == done {
			g.collecting = nil
		}
		close(done)
	}
}
