package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/trace"
	"github.com/minicri/minicri/network/runner"
)

const (
	// killLimit is how long processes may take to go that were killed. A caller waits
	// for no longer; what goes later is noticed in the background.
	killLimit = 2 * time.Second
	// leaveLimit is how long a run may continue when the daemon ends, before it is killed
	// or left to the next daemon.
	leaveLimit = killLimit / 4
)

var (
	errLeft = errors.New("the daemon shuts down: the plugins continue, and the next daemon waits for them")
	// errEnding is for those that change nothing, errLate for what a limit has ended.
	errEnding = errors.New("the daemon shuts down: the plugins were killed")
	errLate   = errors.New("the plugins were killed")
	errStuck  = errors.New("the plugins were killed and do not end")
	// errAnswer: go-cni, or libcni, panicked at what a plugin had answered.
	errAnswer = errors.New("the answer is not what its CNI version says it is")
)

func (n *CNI) add(ctx context.Context, h *held, path string) (result *gocni.Result, err error) {
	a := h.record
	err = n.call(ctx, h, a, "ADD", n.limits.Load().Add, func(ctx context.Context, cni gocni.CNI) (err error) {
		// Not Setup, which reads answers in goroutines of its own, where no code of ours could
		// recover from them.
		result, err = cni.SetupSerially(ctx, a.ID, path, a.options()...)
		return err
	})
	return result, err
}

// del succeeds if every plugin of the chain does. go-cni takes an error for
// success whose text has "not found" in it, or "no such file or directory"; so
// what the plugins themselves answered counts.
func (n *CNI) del(ctx context.Context, h *held, a Attachment, path string) error {
	return n.call(ctx, h, a, "DEL", n.limits.Load().Del, func(ctx context.Context, cni gocni.CNI) error {
		remove := func() error { return recovered(func() error { return cni.Remove(ctx, a.ID, path, a.options()...) }) }
		// What ADD answered is in libcni's cache, where it reads it for DEL; an answer
		// that cannot be decoded is left out: a DEL needs none (CNI SPEC, "DEL").
		if err := remove(); !errors.Is(err, errAnswer) {
			return err
		}
		if err := os.Remove(cachePath(a.Network, a.ID)); err != nil {
			return err
		}
		return remove()
	})
}

// call makes a run of what is called of go-cni, by an instance of its own, so that
// go-cni's lock couples nothing to anything.
func (n *CNI) call(ctx context.Context, h *held, a Attachment, verb string, limit time.Duration, do func(context.Context, gocni.CNI) error) error {
	request := runner.Request{Verb: verb, ID: a.ID, Network: a.Network, Plugins: len(chainOf(a.Config)), Limit: limit}
	return n.run(ctx, h, request, func(ctx context.Context, run *runner.Run) error {
		cni, err := gocni.New(gocni.WithMinNetworkCount(1), gocni.WithInterfacePrefix("eth"))
		if err == nil {
			err = throughExec(cni, libcni.NewCNIConfig(n.options.BinDirs, run))
		}
		if err == nil {
			err = cni.Load(gocni.WithConfListBytes(a.Config))
		}
		if err != nil {
			return fmt.Errorf("load the configuration: %w", err)
		}
		return do(ctx, cni)
	})
}

// throughExec has go-cni call plugins by a libcni with an Exec of ours. go-cni has no
// option for that: it makes the libcni of each instance itself, with an Exec that
// starts a plugin among the daemon's own processes (docs/workarounds.md).
func throughExec(cni gocni.CNI, calls libcni.CNI) error {
	field := reflect.Indirect(reflect.ValueOf(cni)).FieldByName("cniConfig")
	if !field.IsValid() || field.Type() != reflect.TypeFor[libcni.CNI]() {
		return errors.New("go-cni keeps its libcni elsewhere than this version of minicri knows: update minicri")
	}
	reflect.NewAt(field.Type(), field.Addr().UnsafePointer()).Elem().Set(reflect.ValueOf(calls))
	return nil
}

// run begins a run, calls do, and ends the run. At the limit, or with the context,
// everything that the run started is killed, and run returns soon after, whatever
// became of that. A run that may go on keeps the lock of its attachment, if h is not nil.
func (n *CNI) run(ctx context.Context, h *held, request runner.Request, do func(context.Context, *runner.Run) error) error {
	failed := func(err error) error {
		return fmt.Errorf("CNI %s of network %q: %w", request.Verb, request.Network, err)
	}
	run, err := n.runner.Begin(request)
	if err != nil {
		return failed(err)
	}
	err, killed := n.await(ctx, run, do)
	if errors.Is(err, errLeft) {
		if h != nil {
			h.kept = true
		}
		return failed(err)
	}
	reports := run.Reports()
	err = failure(run, reports, err, killed)
	n.record(ctx, reports, err)
	if err != nil {
		limit := killLimit
		if killed != nil {
			limit = time.Millisecond // they have had their time
		}
		if busy := run.Kill(limit); busy != nil {
			l := &linger{run: run, deadline: time.Now(), held: h}
			n.stick(l)
			n.followRun(l)
			return failed(fmt.Errorf("%w\n%w: %w", err, errStuck, busy))
		}
	}
	// What a run that succeeded has left lives on.
	if run.Running() || run.End() != nil {
		n.followRun(&linger{run: run})
	}
	if err != nil {
		return failed(err)
	}
	return nil
}

// await waits for do, for the end of the limit or of the context, or for the end of the
// daemon. killed is why the plugins were killed, nil if they were not.
func (n *CNI) await(ctx context.Context, run *runner.Run, do func(context.Context, *runner.Run) error) (err, killed error) {
	ctx, cancel := context.WithTimeoutCause(ctx, run.Limit, fmt.Errorf("not done after %v, %w", run.Limit, errLate))
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- recovered(func() error { return do(context.WithoutCancel(ctx), run) })
	}()
	ending := n.base.Done()
	if run.Verb == "ADD" {
		ending = nil // its caller ends with the daemon, and destroys what it was making
	}
	select {
	case err := <-done:
		return err, nil
	case <-ending:
	case <-ctx.Done():
	}
	if run.Verb == "ADD" || n.base.Err() == nil { // the context may end with the daemon
		return kill(run, done), context.Cause(ctx)
	}
	select {
	case err := <-done:
		return err, nil
	case <-time.After(leaveLimit):
	}
	if run.Verb == "STATUS" || run.Verb == "CHECK" {
		return kill(run, done), errEnding
	}
	return errLeft, nil
}

// kill ends the processes of a run, and returns what go-cni makes of it.
func kill(run *runner.Run, done <-chan error) error {
	err := run.Kill(killLimit)
	select {
	case err = <-done:
	case <-time.After(killLimit):
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
func (n *CNI) record(ctx context.Context, reports []runner.Report, err error) {
	for _, r := range reports {
		row := step.Row{Kind: "plugin", Step: r.Name + " " + r.Verb, Start: r.Start, Took: r.Took, Error: r.Text(), Plugin: &r.Plugin}
		if blamed, ok := errors.AsType[*PluginError](err); ok && r.Name == blamed.Name {
			row.Error = blamed.Message
		}
		step.Record(ctx, row)
		trace.Past(ctx, row.Step, row.Start, row.Took, row.Error, "cni.plugin", r.Name, "cni.verb", r.Verb)
		if n.options.Observe != nil {
			n.options.Observe(r.Name, r.Verb, row.Took, row.Error == "")
		}
	}
}

// PluginError is the failure of one plugin of a run.
type PluginError struct {
	Network string
	// Plugin is what the run came to. Its Message is also what takes the place of a CNI
	// error: that it did not answer, or answered with something else.
	step.Plugin
	// Advice says what to do about it, "" if there is nothing to say.
	Advice string

	cause error
}

// Error names the plugin, says what it said, and what to do about it.
func (e *PluginError) Error() string {
	text := "plugin " + e.Name + ": " + e.Message
	if e.Code != 0 {
		text += fmt.Sprintf(" (CNI error code %d)", e.Code)
	}
	if e.Advice != "" {
		text += ": " + e.Advice
	}
	return text
}

// Unwrap returns what go-cni, or the end of the run's limit, made of it.
func (e *PluginError) Unwrap() error { return e.cause }

func advice(e *PluginError) string {
	message := strings.ToLower(e.Message)
	says := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(message, text) })
	}
	switch {
	// host-local, Calico, Cilium, whereabouts, and the VPC plugins of clouds.
	case says("no ip addresses available", "no available ip", "no more free ip", "range is full", "no more ips", "could not allocate ip in range",
		"insufficient ip", "no addresses available", "failed to assign an ip address"):
		return fmt.Sprintf("network %q has no free address: remove pods, or give it a larger range", e.Network)
	case e.Code == types.ErrInvalidNetworkConfig || says("invalid range", "invalid cidr", "subnet"):
		return fmt.Sprintf("correct the configuration of network %q", e.Network)
	default:
		return ""
	}
}
