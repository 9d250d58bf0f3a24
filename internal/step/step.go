// Package step runs the named steps of the lives of pods and containers, and
// keeps their timelines.
//
// A Step is data: its name, the operation that it belongs to, and when it is
// left out. The packages sandbox and container each have a list of theirs, over
// which the documentation's test, the crash matrix and the metrics range. A
// Sequence is one way through some of them; around each step it does, in one
// place, all that a step has:
//
//	the name          pod/record, container/rootfs: kind and step
//	error prefix      "record: ...", under the id of the object
//	failpoints        "pod/record before", "pod/record after"
//	limit             the context's, asked for before the step begins
//	metric            by Observer
//	timeline          a Row, also of a step that failed
//	span              of package trace, where the call is traced
//
// A Timeline is what has happened to one object, step by step; Record adds rows
// to it from below, such as the runs of CNI plugins. When the object is gone, or
// could not be made, its Life goes to Lives, which keeps the last ones on disk.
//
// A Timeline has a lock, held for the moment of adding a row. Lives has one,
// held while a file is written. Neither is held while a step runs.
package step

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/internal/trace"
)

// Name is the name of a step: its kind, a slash, and the step's own name.
type Name string

// Kind is what the step happens to: "pod" or "container".
func (n Name) Kind() string {
	kind, _, _ := strings.Cut(string(n), "/")
	return kind
}

// Own is the name without its kind.
func (n Name) Own() string {
	_, own, _ := strings.Cut(string(n), "/")
	return own
}

// Before and After are the failpoints around the step.
func (n Name) Before() string { return string(n) + " before" }

// After is passed when the step has succeeded.
func (n Name) After() string { return string(n) + " after" }

// Error is the failure of a step.
type Error struct {
	Step Name
	Err  error
}

// Error says the step and why it failed.
func (e *Error) Error() string { return e.Step.Own() + ": " + e.Err.Error() }

// Unwrap returns why the step failed.
func (e *Error) Unwrap() error { return e.Err }

// Step is one step of a life, as the lists of sandbox and container have it.
type Step struct {
	Name Name
	// Operation is what goes through the step: "run", "stop", "remove" ...
	Operation string
	// Only says for which objects the step is done; "" for all.
	Only string
}

// Names are the names of the steps of an operation, in their order, for objects
// that are what Only asks for.
func Names(steps []Step, operation string, are ...string) []Name {
	var names []Name
	for _, s := range steps {
		if s.Operation == operation && (s.Only == "" || slices.Contains(are, s.Only)) {
			names = append(names, s.Name)
		}
	}
	return names
}

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

// Err is the error of the first step that failed, joined with those under way.
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
	ctx, end := trace.Begin(s.ctx, string(name))
	err := context.Cause(ctx)
	if err == nil {
		err = failpoint.Hit(name.Before())
	}
	if err == nil {
		err = withCause(ctx, do(context.WithValue(ctx, parentKey{}, parent{s.timeline, name.Own()})))
	}
	if err == nil {
		err = failpoint.Hit(name.After())
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

// withCause names in the error of a step whose context has ended the cause of that: how
// long the limit was, or who cancelled it. What was called, in this process or another,
// knows only that its time was over.
func withCause(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	cause := context.Cause(ctx)
	text, ended := strings.CutSuffix(err.Error(), ctx.Err().Error())
	if !ended || strings.Contains(text, cause.Error()) {
		return err
	}
	return fmt.Errorf("%s%w", text, cause)
}

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
