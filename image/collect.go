package image

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
)

// Collect removes what no record, lease or container holds: blobs, unfinished
// downloads, snapshots and their directories. The database is locked for the
// marking only. The store calls it by itself; it is exported for those who
// cannot wait.
func (s *Store) Collect(ctx context.Context) error {
	ctx = s.scope(ctx)
	if err := s.engine.mark(ctx); err != nil {
		return fmt.Errorf("collect images: %w", err)
	}
	if err := s.engine.overlay.sweep(ctx); err != nil {
		return fmt.Errorf("delete layers: %w", err)
	}
	if !s.engine.compared.Load() {
		return s.collectUnknown(ctx)
	}
	return nil
}

// compareRoom is more than compareDisk writes. Where it ends for want of room, files
// stay that no collection sees.
const compareRoom = 64 << 10

// collectUnknown removes what is on the disk but not in the database, once after
// the start. It needs a little room on the disk: on a full one it waits for a
// later collection, which must not fail for it.
func (s *Store) collectUnknown(ctx context.Context) error {
	err := s.checkFree(compareRoom, "")
	if err == nil {
		err = s.engine.compareDisk(ctx)
	}
	if err != nil {
		s.log.Warn("images are not compared with the disk yet: the next collection retries", "error", err)
		return nil
	}
	return s.Collect(ctx)
}

// collector runs a collection a while after it was asked for, so that a burst
// of removals costs one pass.
type collector struct {
	delay   time.Duration
	collect func(context.Context) error
	log     *slog.Logger

	asked chan struct{} // of one place
	ctx   context.Context
	end   context.CancelFunc
	done  chan struct{}
}

func newCollector(delay time.Duration, collect func(context.Context) error, log *slog.Logger) *collector {
	ctx, end := context.WithCancel(context.Background())
	return &collector{
		delay: delay, collect: collect, log: log,
		asked: make(chan struct{}, 1), ctx: ctx, end: end, done: make(chan struct{}),
	}
}

// soon asks for a pass and does not wait.
func (c *collector) soon() {
	select {
	case c.asked <- struct{}{}:
	default:
	}
}

// start also asks for the first pass, for directories that a predecessor left.
func (c *collector) start() {
	c.soon()
	go c.run()
}

func (c *collector) run() {
	defer close(c.done)
	for c.wait() {
		if err := c.collect(c.ctx); err != nil && c.ctx.Err() == nil {
			c.log.Error("garbage collection of images failed: it is retried after the next removal", "error", err)
		}
	}
}

// wait returns when a pass is due, and false when the store is closing.
func (c *collector) wait() bool {
	select {
	case <-c.asked:
		err := pause(c.ctx, c.delay)
		select {
		case <-c.asked: // meanwhile
		default:
		}
		return err == nil
	case <-c.ctx.Done():
		return false
	}
}

// stop ends a running pass and waits for it.
func (c *collector) stop() {
	c.end()
	<-c.done
}

// lease keeps what is made under the returned context from being collected until
// release, which also asks for a collection of what was not recorded.
func (s *Store) lease(ctx context.Context) (_ context.Context, release func(), err error) {
	held, err := s.leases.Create(ctx, leases.WithRandomID())
	if err != nil {
		return nil, nil, fmt.Errorf("lease: %w", err)
	}
	release = func() {
		if err := s.leases.Delete(context.WithoutCancel(ctx), held); err != nil {
			s.log.Error("a lease could not be deleted: its content stays until the next start", "lease", held.ID, "error", err)
		}
		s.collector.soon()
	}
	return leases.WithLease(ctx, held.ID), release, nil
}

// dropLeases deletes all: a lease belongs to a pull, and none runs yet.
func (s *Store) dropLeases(ctx context.Context) error {
	left, err := s.leases.List(ctx)
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	for _, l := range left {
		if err := s.leases.Delete(ctx, l); err != nil {
			return fmt.Errorf("drop lease %s: %w", l.ID, err)
		}
	}
	return nil
}
