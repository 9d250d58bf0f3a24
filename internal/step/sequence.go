package step

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/internal/trace"
)

// Observer receives each step that has ended; nil if nothing measures.
type Observer func(step Name, took time.Duration, err error)

// Sequence is one way through steps. After the first error that Step or Join sees (that of
// Async is seen by Join) the steps that follow do nothing, so a function of Steps reads as a
// table of contents. It is used by one goroutine.
type Sequence struct {
	ctx      context.Context
	observe  Observer
	timeline *Timeline
	err      error
}

// Begin starts a sequence whose steps end with ctx and add to the timeline.
func Begin(ctx context.Context, observe Observer, timeline *Timeline) *Sequence {
	return &Sequence{ctx: ctx, observe: observe, timeline: timeline}
}

// Err is the error of the first step that failed, joined with those that were
// under way.
func (s *Sequence) Err() error { return s.err }

// Step does a step, unless an earlier one failed.
func (s *Sequence) Step(name Name, do func(context.Context) error) {
	if s.err == nil {
		s.err = s.Do(name, do)
	}
}

// Do does a step whatever became of the others, and returns its error: for
// teardown, which does every part.
func (s *Sequence) Do(name Name, do func(context.Context) error) error {
	row := s.timeline.begin(name)
	began := time.Now()
	ctx, end := trace.Begin(s.ctx, string(name))
	err := s.do(ctx, name, do)
	end(err)
	s.timeline.end(row, err)
	if s.observe != nil {
		s.observe(name, time.Since(began), err)
	}
	if err != nil {
		return &Error{Step: name, Err: err}
	}
	return nil
}

func (s *Sequence) do(ctx context.Context, name Name, do func(context.Context) error) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := failpoint.Hit(name.Before()); err != nil {
		return err
	}
	if err := do(withParent(ctx, s.timeline, name)); err != nil {
		return withCause(ctx, err)
	}
	return failpoint.Hit(name.After())
}

// withCause gives the error of a step whose context has ended the cause of that: how
// long the limit was, or who cancelled it, with the kind of error that this is. What
// was called, in this process or another, knows only that its time was over.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	for _, end := range []error{context.DeadlineExceeded, context.Canceled} {
		text, is := strings.CutSuffix(err.Error(), end.Error())
		if !is || cause == nil || strings.Contains(text, cause.Error()) {
			continue
		}
		switch {
		case errors.Is(cause, end):
			return &endedError{text: text + cause.Error(), err: err}
		case end == context.Canceled:
			return &endedError{text: text + cause.Error(), err: cause}
		}
	}
	return err
}

// endedError is an error whose text names why the context ended.
type endedError struct {
	text string
	err  error
}

func (e *endedError) Error() string { return e.text }
func (e *endedError) Unwrap() error { return e.err }

// Async is a step that runs alongside those that follow it.
type Async struct {
	done chan struct{}
	err  error
}

// Wait waits for the end of the step and returns its error.
func (a *Async) Wait() error {
	<-a.done
	return a.err
}

// Async starts a step, unless an earlier one failed. It must be waited for.
func (s *Sequence) Async(name Name, do func(context.Context) error) *Async {
	a := &Async{done: make(chan struct{})}
	if s.err != nil {
		close(a.done)
		return a
	}
	go func() {
		defer close(a.done)
		a.err = s.Do(name, do)
	}()
	return a
}

// Join waits for an async step, even when another step has failed: what is
// undone must have ended.
func (s *Sequence) Join(a *Async) {
	if err := a.Wait(); err != nil && !errors.Is(s.err, err) {
		s.err = errors.Join(s.err, err)
	}
}

// Bound gives the context of work that its caller only waits for: it has the
// values of ctx and none of its limits, and ends with base and after limit. Its
// cause says which.
func Bound(ctx, base context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(base, func() { cancel(context.Cause(base)) })
	ctx, release := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %v: %w", limit, context.DeadlineExceeded))
	return ctx, func() {
		release()
		stop()
		cancel(nil)
	}
}
