package network

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/trace"
	"github.com/minicri/minicri/network/runner"
)

const (
	// killLimit is how long processes may take to go that were killed. A caller waits
	// for no longer; what goes later is noticed in the background.
	killLimit = 2 * time.Second
	// leaveLimit is the same when the daemon ends, and how long a run may continue then
	// that is left to the next daemon.
	leaveLimit = 500 * time.Millisecond
)

var (
	// errLeft: the daemon ends before the plugins do. They run on, and the next
	// daemon waits for them.
	errLeft = errors.New("the daemon shuts down: the plugins continue, and the next daemon waits for them")
	// errEnding: the daemon ends, and the plugins with it: they change nothing.
	errEnding = errors.New("the daemon shuts down: the plugins were killed")
	// errStuck: the processes of a run did not go when they were killed.
	errStuck = errors.New("the plugins were killed and do not end")
	// errAnswer: go-cni, or libcni, panicked at what a plugin had answered.
	errAnswer = errors.New("the answer is not what its CNI version says it is")
)

// outcome is what came of a run.
type outcome struct {
	// stuck is the run when its processes could not be ended; it is over when
	// they are gone.
	stuck *runner.Run
	// late is set when it was killed at its limit, gaveUp when its attachment is given up.
	late, gaveUp bool
	err          error
}

// run begins a run, calls do, and ends the run. At the limit, or with the context,
// everything that the run started is killed, and run returns soon after, whatever
// became of that.
func (p *plugins) run(ctx context.Context, request runner.Request, do func(context.Context, *runner.Run) error) (o outcome) {
	defer func() {
		if o.err != nil {
			o.err = fmt.Errorf("CNI %s of network %q: %w", request.Verb, request.Network, o.err)
		}
	}()
	run, err := p.runner.Begin(request)
	if err != nil {
		return outcome{err: err}
	}
	err, killed := p.follow(ctx, run, do)
	if errors.Is(err, errLeft) {
		return outcome{err: err}
	}
	o.late = killed != nil && ctx.Err() == nil
	reports := run.Reports()
	o.err = failure(run, reports, err, killed)
	p.record(ctx, reports, o.err)
	if err := p.end(run, o.err, killed != nil); err != nil {
		o.err = errors.Join(o.err, err)
		o.stuck = run
	}
	return o
}

// follow waits for do, for the end of the limit or of the context, or for the
// end of the daemon. killed is why the plugins were killed, nil if they were
// not.
func (p *plugins) follow(ctx context.Context, run *runner.Run, do func(context.Context, *runner.Run) error) (err, killed error) {
	ctx, cancel := context.WithTimeoutCause(ctx, run.Limit, fmt.Errorf("not done after %v, the plugins were killed", run.Limit))
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- recovered(func() error { return do(context.WithoutCancel(ctx), run) })
	}()
	ending := p.ending
	if run.Verb == "ADD" {
		ending = nil // its caller ends with the daemon, and destroys what it was making
	}
	select {
	case err := <-done:
		return err, nil
	case <-ending:
	case <-ctx.Done():
		if !isClosed(ending) { // or the context ends with the daemon
			limit := killLimit
			if isClosed(p.ending) {
				limit = leaveLimit
			}
			return p.kill(run, done, limit), context.Cause(ctx)
		}
	}
	if run.Verb == "STATUS" || run.Verb == "CHECK" {
		return p.kill(run, done, leaveLimit), errEnding
	}
	select {
	case err := <-done:
		return err, nil
	case <-time.After(leaveLimit):
		return errLeft, nil
	}
}

// kill ends the processes of a run, and returns what go-cni makes of it. A plugin
// that is being started may enter its cgroup only after that has been killed.
func (p *plugins) kill(run *runner.Run, done <-chan error, limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for {
		err := run.Kill(time.Until(deadline))
		select {
		case doErr := <-done:
			return doErr
		case <-time.After(firstLook):
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

// recovered makes a panic of go-cni or libcni an error: they panic at an address of an
// interface that is not listed, and at null in the place of an interface.
func recovered(do func() error) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("%w: %v", errAnswer, reason)
		}
	}()
	return do()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false // also where it is nil
	}
}

// record adds a row for each plugin to the timeline of what the run was for.
func (p *plugins) record(ctx context.Context, reports []runner.Report, err error) {
	for _, r := range reports {
		ran := row(r, err)
		step.Record(ctx, ran)
		trace.Past(ctx, ran.Step, ran.Start, ran.Took, ran.Error, "cni.plugin", r.Plugin, "cni.verb", r.Verb)
		if p.observe != nil {
			p.observe(r.Plugin, r.Verb, ran.Took, ran.Error == "")
		}
	}
}

func row(r runner.Report, err error) step.Row {
	row := step.Row{Kind: "plugin", Step: r.Plugin + " " + r.Verb, Start: r.Start, Took: r.Took, Plugin: &step.Plugin{
		Name: r.Plugin, Verb: r.Verb, Killed: !r.Ended, Exit: r.Exit, Signal: r.Signal,
		Code: r.Code, Message: r.Message, Details: r.Details, Stderr: r.Stderr,
	}}
	blamed, ok := errors.AsType[*PluginError](err)
	switch {
	case ok && r.Plugin == blamed.Plugin && r.Verb == blamed.Verb:
		row.Error = blamed.Message
	case r.Failed() || r.Answer != "":
		row.Error = r.Text()
	}
	if row.Took == 0 && !r.Ended {
		row.Took = time.Since(r.Start)
	}
	return row
}
