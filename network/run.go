package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
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
	leaveLimit = killLimit / 4
)

var (
	errLeft = errors.New("the daemon shuts down: the plugins continue, and the next daemon waits for them")
	// errEnding is for those that change nothing.
	errEnding = errors.New("the daemon shuts down: the plugins were killed")
	errStuck  = errors.New("the plugins were killed and do not end")
	// errAnswer: go-cni, or libcni, panicked at what a plugin had answered.
	errAnswer = errors.New("the answer is not what its CNI version says it is")
)

// outcome is what came of a run.
type outcome struct {
	// stuck is the run when its processes could not be ended; it is over when they go.
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
		if o.stuck = run; run.ID == "" {
			p.stick(run, held{})
		}
	}
	return o
}

// follow waits for do, for the end of the limit or of the context, or for the end of the
// daemon. killed is why the plugins were killed, nil if they were not.
func (p *plugins) follow(ctx context.Context, run *runner.Run, do func(context.Context, *runner.Run) error) (err, killed error) {
	ctx, cancel := context.WithTimeoutCause(ctx, run.Limit, fmt.Errorf("not done after %v, the plugins were killed", run.Limit))
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- recovered(func() error { return do(context.WithoutCancel(ctx), run) })
	}()
	ending := p.daemon.Done()
	if run.Verb == "ADD" {
		ending = nil // its caller ends with the daemon, and destroys what it was making
	}
	select {
	case err := <-done:
		return err, nil
	case <-ending:
	case <-ctx.Done():
	}
	switch {
	case run.Verb == "ADD" || p.daemon.Err() == nil: // the context may end with the daemon
		return kill(run, done, killLimit), context.Cause(ctx)
	case run.Verb == "STATUS" || run.Verb == "CHECK":
		return kill(run, done, leaveLimit), errEnding
	}
	select {
	case err := <-done:
		return err, nil
	case <-time.After(leaveLimit):
		return errLeft, nil
	}
}

// kill ends the processes of a run, and returns what go-cni makes of it.
func kill(run *runner.Run, done <-chan error, limit time.Duration) error {
	over := time.After(limit)
	err := run.Kill(limit)
	select {
	case err = <-done:
	case <-over:
	}
	return err
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

// failure is the error of a run: that of each plugin that failed, for all
// verbs but DEL that of the first. err is what go-cni makes of the run, killed
// why it was killed. A DEL has failed if a plugin of its chain has, whatever
// go-cni makes of it.
func failure(run *runner.Run, reports []runner.Report, err, killed error) error {
	if run.Verb == "DEL" {
		err = cmp.Or(err, run.Verdict())
	}
	cause := cmp.Or(killed, err)
	if cause == nil {
		return nil
	}
	var errs []error
	for _, r := range reports {
		if r.Failed() {
			errs = append(errs, newPluginError(run, r, cause, killed))
		}
	}
	_, disk := errors.AsType[*fs.PathError](err) // libcni's cache
	// A plugin is to blame for its answer until libcni has gone on to the next one.
	blame := run.Verb == "ADD" && killed == nil && !disk && run.Sought == len(reports)
	if last := len(reports) - 1; len(errs) == 0 && last >= 0 && blame {
		e := newPluginError(run, reports[last], cause, nil)
		e.Message = "it succeeded, and " + cmp.Or(e.Message, "what it printed is no CNI result: "+cause.Error())
		e.Advice = "run a version of the plugin that prints its result and nothing else to stdout"
		errs = append(errs, e)
	}
	switch {
	case len(errs) == 0:
		return cause
	case run.Verb != "DEL":
		return errs[0]
	}
	if missing := run.Plugins - len(reports); missing > 0 {
		errs = append(errs, fmt.Errorf("%d of the %d plugins did not run", missing, run.Plugins))
	}
	return errors.Join(errs...)
}

func newPluginError(run *runner.Run, r runner.Report, cause, killed error) *PluginError {
	e := &PluginError{Network: run.Network, Plugin: r.Plugin, cause: cause}
	e.Message = r.Text()
	if r.Killed && killed != nil {
		e.Message += ": " + killed.Error()
		e.Advice = fmt.Sprintf("find out what it waits for, an agent or a lock; its limit is limits.cni_%s", strings.ToLower(run.Verb))
	} else {
		e.Advice = advice(e)
	}
	return e
}

// record adds a row for each plugin to the timeline of what the run was for.
func (p *plugins) record(ctx context.Context, reports []runner.Report, err error) {
	for _, r := range reports {
		row := step.Row{Kind: "plugin", Step: r.Name + " " + r.Verb, Start: r.Start, Took: r.Took, Error: r.Text(), Plugin: &r.Plugin}
		if blamed, ok := errors.AsType[*PluginError](err); ok && r.Name == blamed.Name {
			row.Error = blamed.Message
		}
		step.Record(ctx, row)
		trace.Past(ctx, row.Step, row.Start, row.Took, row.Error, "cni.plugin", r.Name, "cni.verb", r.Verb)
		if p.observe != nil {
			p.observe(r.Name, r.Verb, row.Took, row.Error == "")
		}
	}
}
