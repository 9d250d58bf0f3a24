package network

import (
	"context"
	"fmt"
	"sync"
)

// gate keeps garbage collection and all other plugin runs apart: CNI GC must
// not run beside an ADD or DEL (CNI SPEC, "GC"). Collection gives way: it
// starts only when nothing runs, and who comes meanwhile cuts it short.
type gate struct {
	mu      sync.Mutex
	running int
	// cancel ends the collection under way, over is closed when it has ended.
	cancel context.CancelFunc
	over   chan struct{}
}

func (g *gate) enter(ctx context.Context) error {
	g.mu.Lock()
	g.running++
	over := g.over
	if g.cancel != nil {
		g.cancel()
	}
	g.mu.Unlock()
	if over == nil {
		return nil
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		g.leave()
		return fmt.Errorf("wait for CNI GC to end: %w", context.Cause(ctx))
	}
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
}

// collect runs f if nothing else runs, under a context that ends when
// something else wants to; it tells whether f was run to its end.
func (g *gate) collect(ctx context.Context, f func(context.Context)) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g.mu.Lock()
	if g.running > 0 || g.over != nil {
		g.mu.Unlock()
		return false
	}
	over := make(chan struct{})
	g.cancel, g.over = cancel, over
	g.mu.Unlock()

	f(ctx)
	finished := ctx.Err() == nil

	g.mu.Lock()
	defer g.mu.Unlock()
	g.cancel, g.over = nil, nil
	close(over)
	return finished
}
