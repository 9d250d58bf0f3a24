package client

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
)

// endingInterval is between two looks at a supervisor that is about to end: it
// holds its directory's lock and does not answer.
const endingInterval = 20 * time.Millisecond

// serving connects to a group's supervisor, or starts it; mu is held.
func (s *Set) serving(ctx context.Context, g *group) (*Client, error) {
	for began := time.Now(); ; time.Sleep(endingInterval) {
		supervisor, err := g.connect(ctx, s)
		if !errdefs.IsUnavailable(err) || ctx.Err() != nil {
			return supervisor, err
		}
		holder, err := api.LockHolder(g.dir)
		if err == nil && holder != 0 && time.Since(began) < holderGrace {
			continue
		}
		if err := g.failed.wait(); err != nil {
			return nil, err
		}
		if err == nil && holder != 0 {
			err = endHolder(g.dir)
		}
		if err == nil {
			err = s.Known(filepath.Base(g.dir))
		}
		if err == nil {
			supervisor, err = s.start(ctx, g)
		}
		if err == nil {
			g.failed = backOff{}
			return g.use(supervisor), nil
		}
		if next := g.failed.note(err); s.options.Logger != nil {
			s.options.Logger.Error("a supervisor does not start: it is tried again", "dir", g.dir, "after", next, "err", err)
		}
		return nil, err
	}
}

func (s *Set) start(ctx context.Context, g *group) (*Client, error) {
	options := s.options.Start
	options.Dir, options.answer = g.dir, &s.answer
	started, err := Start(ctx, options)
	if err != nil {
		return nil, err
	}
	if err := started.greet(ctx, s.options); err != nil {
		return nil, errors.Join(err, started.Close())
	}
	return started, nil
}

// backOff keeps a start that has failed from being tried again at once.
type backOff struct {
	err   error // why it failed
	pause time.Duration
	until time.Time
}

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 5 * time.Second
)

// note is for a start that has failed, and returns when there may be the next.
func (b *backOff) note(err error) time.Duration {
	b.pause = min(max(2*b.pause, firstPause), longestPause)
	b.err, b.until = err, time.Now().Add(b.pause)
	return b.pause
}

// wait says why there is no start now, nil if there may be one.
func (b *backOff) wait() error {
	if left := time.Until(b.until); left > 0 {
		return fmt.Errorf("the supervisor is started again in %v, its last start failed: %w: %w", left.Round(time.Millisecond), errdefs.ErrUnavailable, b.err)
	}
	return nil
}
