// Package step runs the named steps of the lives of pods and containers, and keeps their timelines.
//
// A Sequence is one way through the steps of an operation, which packages sandbox and container name. It does all that
// a step has:
//
//	the name          pod/record, container/rootfs: kind and step
//	error prefix      "record: ...", under the id of the object
//	failpoints        "pod/record before", "pod/record after"
//	limit             the context's, asked for before the step begins
//	metric            by Observer
//	timeline          a Row, also of a step that failed
//	span              of package trace, where the call is traced
//
// A Timeline is what has happened to one object. Record adds rows from below, such as runs of CNI plugins.
// Lives keeps the Life of an object that is gone, or could not be made, on disk.
//
// A Timeline's lock is held to add a row, that of Lives to write a file; neither is held while a step runs.
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

// Name is a kind, a slash, and the step's own name.
type Name string

// Kind is "pod" or "container".
func (n Name) Kind() string {
	kind, _, _ := strings.Cut(string(n), "/")
	return kind
}

// Own is the name without its kind.
func (n Name) Own() string {
	_, own, _ := strings.Cut(string(n), "/")
	return own
}

// Before is the failpoint before the step.
func (n Name) Before() string { return string(n) + " before" }

// After is the failpoint that a successful step passes.
func (n Name) After() string { return string(n) + " after" }

// Error is the failure of a step.
type Error struct {
	Step Name
	Err  error
}

// Error names the step.
func (e *Error) Error() string { return e.Step.Own() + ": " + e.Err.Error() }

// Unwrap returns why the step failed.
func (e *Error) Unwrap() error { return e.Err }

// Observer receives each step that has ended.
type Observer func(step Name, took time.Duration, err error)

// Sequence is one way through steps. After the first error that Step or Join sees, the following steps do
// nothing, so a function of Steps reads as a table of contents. One goroutine uses it.
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

// Err is the error of the first failed step, joined with those under way then.
func (s *Sequence) Err() error { return s.err }

// Step does a step, unless an earlier one failed.
func (s *Sequence) Step(name Name, do func(context.Context) error) {
	if s.err == nil {
		s.err = s.Do(name, do)
	}
}

// Do does a step even if others failed, and returns its error: teardown does every part.
func (s *Sequence) Do(name Name, do func(context.Context) error) error {
	row := s.timeline.begin(name)
	ctx, end := trace.Begin(s.ctx, string(name))
	err := context.Cause(ctx)
	if err == nil {
		err = failpoint.From(ctx)(name.Before())
	}
	if err == nil {
		err = withCause(ctx, do(context.WithValue(ctx, parentKey{}, parent{s.timeline, name.Own()})))
	}
	if err == nil {
		err = failpoint.From(ctx)(name.After())
	}
	end(err)
	s.timeline.end(row, err)
	if s.observe != nil {
		s.observe(name, row.Took, err)
	}
	if err != nil {
		return &Error{Step: name, Err: err}
	}
	return nil
}

// withCause adds to the error of a step whose context has ended the cause: the limit, or who cancelled. What
// the step called knows only that its time was over.
func withCause(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	cause := context.Cause(ctx)
	text, ended := strings.CutSuffix(err.Error(), ctx.Err().Error())
	if !ended || strings.Contains(err.Error(), cause.Error()) {
		return err
	}
	if !errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("%s%w", text, cause)
	}
	return &lateError{text + cause.Error(), err}
}

// lateError names the limit that is over, and is of the kind that the step's own error is.
type lateError struct {
	text string
	err  error
}

func (e *lateError) Error() string { return e.text }
func (e *lateError) Unwrap() error { return e.err }

// Async is a step that runs alongside those that follow it.
type Async struct {
	done chan struct{}
	err  error
}

// Wait returns the error of the step when it has ended.
func (a *Async) Wait() error {
	<-a.done
	return a.err
}

// Async starts a step, unless an earlier one failed. The caller must wait for it.
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

// Join waits for an async step even if another failed: what is undone must have ended.
func (s *Sequence) Join(a *Async) {
	if err := a.Wait(); err != nil && !errors.Is(s.err, err) {
		s.err = errors.Join(s.err, err)
	}
}

// Bound returns the context of work that its caller only waits for. It has the values of ctx but not its
// limits, and ends with base and after limit. Its cause says which.
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
