package stats

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/image"
)

const (
	// layerWait is how long a list waits for layers that are being walked; then
	// it answers with what was measured before. In a first answer the layers that
	// take longer are missing: one on a disk that hangs must not delay others.
	layerWait = 50 * time.Millisecond
	// aloneWait is how long a call about a single container or pod waits for a
	// first measurement.
	aloneWait = time.Second
	// layerAge is how long a measurement is good: the kubelet's period.
	layerAge = 10 * time.Second
	// layersAtOnce are walked concurrently.
	layersAtOnce = 4
)

// Layers measures the writable layer of a container, which may take as long as
// the layer is large.
type Layers interface {
	SnapshotUsage(ctx context.Context, containerID string) (image.Usage, error)
}

// layers keeps the last measurement of each container's writable layer.
type layers struct {
	source Layers
	logger *slog.Logger
	slots  chan struct{}

	// base ends when the daemon does; work are the walks that it ends.
	base   context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu   sync.Mutex // guards last, and all in it
	last map[string]*layer
}

// layer is one container's. The usage is zero before the first measurement has
// ended; walk is closed when the one under way does, nil if none is.
type layer struct {
	usage image.Usage
	asked time.Time
	walk  chan struct{}
}

func newLayers(ctx context.Context, source Layers, logger *slog.Logger) *layers {
	l := &layers{source: source, logger: logger, slots: make(chan struct{}, layersAtOnce), last: make(map[string]*layer)}
	l.base, l.cancel = context.WithCancel(ctx)
	return l
}

// refreshOne is refresh with the longer wait of a call about one object.
func (l *layers) refreshOne(ctx context.Context, containers []Container) {
	wait := layerWait
	for _, c := range containers {
		if _, measured := l.of(c.ID); !measured {
			wait = aloneWait
		}
	}
	l.refresh(ctx, containers, wait)
}

// refresh has the layers measured whose last measurement is old, and waits for
// them, for no longer than the limit.
func (l *layers) refresh(ctx context.Context, containers []Container, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, walk := range l.start(containers) {
		select {
		case <-walk:
		case <-ctx.Done():
			return
		}
	}
}

// start begins the walks that are due and returns all that are under way.
func (l *layers) start(containers []Container) (walks []<-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.prune()
	for _, c := range containers {
		one := l.last[c.ID]
		if one == nil {
			one = &layer{}
			l.last[c.ID] = one
		}
		one.asked = time.Now()
		if one.walk == nil && time.Since(one.usage.Time) >= layerAge && l.base.Err() == nil {
			one.walk = make(chan struct{})
			l.work.Go(func() { l.walk(c.ID) })
		}
		if one.walk != nil {
			walks = append(walks, one.walk)
		}
	}
	return walks
}

func (l *layers) walk(id string) {
	var usage image.Usage
	err := l.base.Err()
	select {
	case l.slots <- struct{}{}:
		usage, err = l.source.SnapshotUsage(l.base, id)
		<-l.slots
	case <-l.base.Done():
	}
	if err != nil && !errdefs.IsNotFound(err) && l.base.Err() == nil {
		l.logger.Warn("a writable layer cannot be measured", "container", id, "err", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.last[id]
	close(one.walk)
	one.walk = nil
	if err == nil {
		one.usage = usage
	}
}

// prune removes the layers that no request asks for; mu is held.
func (l *layers) prune() {
	for id, one := range l.last {
		if one.walk == nil && time.Since(one.asked) >= sampleAge {
			delete(l.last, id)
		}
	}
}

// of is the last measurement, false before the first has ended.
func (l *layers) of(id string) (image.Usage, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.last[id]
	if one == nil || one.usage.Time.IsZero() {
		return image.Usage{}, false
	}
	return one.usage, true
}

func (l *layers) close() {
	l.cancel()
	l.work.Wait()
}
