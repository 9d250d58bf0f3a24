package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/trace"
	"github.com/minicri/minicri/network/runner"
)

var (
	errLeft = fmt.Errorf("the daemon shuts down: the plugins continue, and the next daemon waits for them: %w", errdefs.ErrUnavailable)
	// errEnding is for verbs that may be repeated, errLate for runs that reached their limit.
	errEnding = errors.New("the daemon shuts down: the plugins were killed")
	errLate   = errors.New("the plugins were killed")
	errStuck  = errors.New("the plugins were killed and do not end")
	// errAnswer means that go-cni or libcni panicked at a plugin's answer.
	errAnswer = errors.New("the answer is not what its CNI version says it is")
)

// del runs DEL, which succeeds if every plugin does: we look at the plugins' own answers, because go-cni
// takes an error with "not found" or "no such file or directory" in its text for success.
func (n *CNI) del(ctx context.Context, h *locked, a Attachment, path string) error {
	path = n.pathAsAdded(a, path)
	return n.call(ctx, h, a, "DEL", n.limits.Load().Del, func(ctx context.Context, cni gocni.CNI) error {
		remove := func() error { return recovered(func() error { return cni.Remove(ctx, a.ID, path, a.options()...) }) }
		// libcni panics at a bad answer of ADD in its cache. DEL needs none (CNI SPEC), so we remove it.
		if err := remove(); !errors.Is(err, errAnswer) {
			return err
		}
		if err := os.Remove(n.cachePath(a)); err != nil {
			return err
		}
		return remove()
	})
}

// call makes a run of a go-cni call. Each has an instance of its own, so that go-cni's lock couples nothing.
func (n *CNI) call(ctx context.Context, h *locked, a Attachment, verb string, limit time.Duration, do func(context.Context, gocni.CNI) error) error {
	request := runner.Request{Verb: verb, ID: a.ID, Network: a.Network, Plugins: len(chainOf(a.Config)), Limit: limit}
	directories := searchedBy(a.Config, n.options.BinDirs)
	return n.run(ctx, h, request, func(ctx context.Context, run *runner.Run) error {
		cni, err := gocni.New(gocni.WithMinNetworkCount(1), gocni.WithInterfacePrefix("eth"))
		if err == nil {
			err = throughExec(cni, libcni.NewCNIConfigWithCacheDir(directories, n.options.CacheDir, run))
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

// throughExec makes go-cni call plugins by a libcni with our Exec, a runner.Run, whose FindInPath and ExecPlugin are
// called for each plugin. go-cni has no option for that; its own libcni starts plugins among the daemon's processes
// (docs/contributors/workarounds.md).
func throughExec(cni gocni.CNI, calls libcni.CNI) error {
	field := reflect.Indirect(reflect.ValueOf(cni)).FieldByName("cniConfig")
	if !field.IsValid() || field.Type() != reflect.TypeFor[libcni.CNI]() {
		return errors.New("go-cni keeps its libcni elsewhere than this version of minicri knows: update minicri")
	}
	reflect.NewAt(field.Type(), field.Addr().UnsafePointer()).Elem().Set(reflect.ValueOf(calls))
	return nil
}

// turn waits until fewer than Limits.AtOnce other chains of plugins run for ADD and DEL: many at once only hinder each
// other, as most wait for the same locks of the kernel. A chain that waits for an agent gives its turn back.
func (n *CNI) turn(ctx context.Context, verb string) (end func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if verb == "DEL" { // the caller of an ADD ends with the daemon
		defer context.AfterFunc(n.base, func() { cancel(errLeft) })()
	}
	turns := n.limits.Load().turns
	if err := turns.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("wait for other plugin runs: %w", context.Cause(ctx))
	}
	release := sync.OnceFunc(func() { turns.Release(1) })
	late := time.AfterFunc(turnLimit, release)
	return func() { late.Stop(); release() }, nil
}

// run begins a run, calls do and ends the run. At the limit, or when the context ends, it kills all that the
// run started and returns soon after, even if that did not help. A run that may go on keeps the lock h.
func (n *CNI) run(ctx context.Context, h *locked, request runner.Request, do func(context.Context, *runner.Run) error) error {
	failed := func(err error) error {
		if !errors.Is(err, errLeft) && !errors.Is(err, errEnding) {
			n.countFailure(Failed{request.Network, request.Verb})
		}
		return fmt.Errorf("CNI %s of network %q: %w", request.Verb, request.Network, err)
	}
	if request.Verb == "ADD" || request.Verb == "DEL" {
		end, err := n.turn(ctx, request.Verb)
		if err != nil {
			return failed(err)
		}
		defer end()
	}
	run, err := n.runs.Begin(request)
	if err != nil {
		return failed(err)
	}
	err, killed := n.await(ctx, run, do)
	if errors.Is(err, errLeft) {
		if h != nil {
			h.keep = func() {} // until the daemon has ended
		}
		return failed(err)
	}
	reports := run.Reports()
	err = failure(run, reports, err, killed)
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
	if err != nil {
		limit := process.KillLimit
		if killed != nil {
			limit = time.Millisecond // they have had their time
		}
		if busy := run.Kill(limit); busy != nil {
			l := &linger{run: run, deadline: time.Now(), locked: h}
			n.stick(l)
			if h == nil {
				n.followRun(l)
			} else { // it unlocks the attachment, which the caller still works with
				h.keep = func() { n.followRun(l) }
			}
			return failed(fmt.Errorf("%w\n%w: %w", err, errStuck, busy))
		}
	}
	// Processes that a successful run has left live on.
	if run.Running() || run.End() != nil {
		n.followRun(&linger{run: run})
	}
	if err != nil {
		return failed(err)
	}
	return nil
}

// Failed identifies a failure: the plugins of a network, and the verb.
type Failed struct{ Network, Verb string }

// mostFailed bounds the networks that are counted one by one.
const mostFailed = 64

func (n *CNI) countFailure(of Failed) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, known := n.failures[of]; !known && len(n.failures) >= mostFailed {
		of.Network = "other"
	}
	n.failures[of]++
}

// Failures returns how often the plugins of each network have failed since the start.
func (n *CNI) Failures() map[Failed]int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.failures)
}

// await waits for do, the limit, the context or the daemon's end. killed is why it killed the plugins.
func (n *CNI) await(ctx context.Context, run *runner.Run, do func(context.Context, *runner.Run) error) (err, killed error) {
	ctx, cancel := context.WithTimeoutCause(ctx, run.Time(), late(run))
	defer cancel()
	run.Until, _ = ctx.Deadline()
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
	if run.Verb != "DEL" { // the next daemon would end it, too
		return kill(run, done), errEnding
	}
	return errLeft, nil
}

func late(run *runner.Run) error { return fmt.Errorf("not done after %v, %w", run.Limit, errLate) }

func kill(run *runner.Run, done <-chan error) error {
	err := run.Kill(process.KillLimit)
	select {
	case err = <-done:
	case <-time.After(process.KillLimit):
	}
	return err
}

// recovered turns panics into errors: go-cni and libcni panic at unlisted interfaces of addresses, and at null.
func recovered(do func() error) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("%w: %v", errAnswer, reason)
		}
	}()
	return do()
}

// failure returns the error of a run: the first failed plugin's, or all of them for DEL, which fails if any
// plugin does, whatever go-cni says. err is go-cni's view, killed the reason for a kill.
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
	// A plugin is to blame for its answer until libcni has looked for the next one.
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
	if r.Killed {
		if r.Late { // whatever ended the run later
			killed = late(run)
		}
		e.Message += ": " + cmp.Or(killed, late(run)).Error()
		e.Advice = fmt.Sprintf("find out what it waits for, an agent or a lock; its limit is limits.cni_%s", strings.ToLower(run.Verb))
	} else {
		e.Advice = advice(e)
	}
	return e
}

// PluginError is the failure of one plugin of a run.
type PluginError struct {
	Network string
	// Plugin is what became of the plugin. Its Message also says that no, or another, answer came.
	step.Plugin
	// Advice says what to do, if anything.
	Advice string
	cause  error
}

// Error names the plugin and says what it answered and what to do.
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

// Unwrap returns go-cni's error, or the limit's.
func (e *PluginError) Unwrap() error { return e.cause }

func advice(e *PluginError) string {
	message := strings.ToLower(e.Message)
	says := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(message, text) })
	}
	switch {
	case says("start the plugin") && says("permission denied"):
		return "it is not executable: chmod +x, or install it again"
	case says("start the plugin") && says("exec format error"):
		return fmt.Sprintf("it is for another architecture than %s, or a script without #!: install it again", runtime.GOARCH)
	// These are the words of host-local, Calico, Cilium, whereabouts and cloud VPC plugins.
	case says("no ip addresses available", "no available ip", "no more free ip", "range is full", "no more ips", "could not allocate ip in range",
		"insufficient ip", "no addresses available", "failed to assign an ip address"):
		return fmt.Sprintf("network %q has no free address: remove pods, or give it a larger range", e.Network)
	case e.Code == types.ErrInvalidNetworkConfig || says("invalid range", "invalid cidr", "subnet"):
		return fmt.Sprintf("correct the configuration of network %q", e.Network)
	case e.Verb == "ADD" && says("operation not supported", "unknown device type"):
		module := map[string]string{"vlan": "8021q", "bandwidth": "sch_tbf ifb act_mirred"}[e.Name]
		return "the kernel may lack what this plugin makes: modprobe " + cmp.Or(module, e.Name)
	case says("mkdir ") && e.Verb == "ADD": // host-local, by the plugin that calls it
		return fmt.Sprintf("the IPAM plugin of network %q keeps its addresses there: set another dataDir", e.Network)
	case says("connection refused", "i/o timeout", "no such host", "no route to host"):
		return "see whether the agent or the API server of the plugin runs: the plugin reached nobody there"
	default:
		return ""
	}
}
