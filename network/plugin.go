package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
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
	// lastLimit is the same for processes that were killed before.
	lastLimit = 100 * time.Millisecond
	// returnLimit is how long go-cni may take to return when nothing of its
	// plugins is left: a process that left the cgroup may hold a pipe.
	returnLimit = time.Second
	// endLimit is the same when the daemon ends.
	endLimit = 500 * time.Millisecond
	// defaultEndingLimit is that of plugins.endingLimit.
	defaultEndingLimit = 500 * time.Millisecond
	// leaveLimit is how long a run may continue while the daemon shuts down.
	leaveLimit = 500 * time.Millisecond
)

var (
	// errLeft: the daemon ends before the plugins do. They run on, and the next
	// daemon takes their result.
	errLeft = errors.New("the daemon shuts down: the plugins continue, and the next daemon takes their result")
	// errEnding: the daemon ends, and the plugins with it: they change nothing.
	errEnding = errors.New("the daemon shuts down: the plugins were killed")
	// errStuck: the processes of a run did not go when they were killed.
	errStuck = errors.New("the plugins were killed and do not end")
)

// plugins runs the verbs of CNI, each as a run of its own: go-cni, which knows
// how each plugin is called, is given the directory of the run.
type plugins struct {
	runner *runner.Runner
	limits *atomic.Pointer[limitsInForce]
	// gcCache is the cache that libcni's GC reads.
	gcCache string
	// endingLimit is how long a daemon that ends waits for processes of a DEL.
	endingLimit time.Duration
	// ending is closed when the daemon ends.
	ending  <-chan struct{}
	observe func(plugin, verb string, took time.Duration, ok bool)
	logger  *slog.Logger

	lingering lingering
}

// outcome is what came of a run.
type outcome struct {
	// stuck is the run when its processes could not be ended; it is over when
	// they are gone.
	stuck *runner.Run
	// late is set when it was killed at its limit.
	late bool
	err  error
}

func (p *plugins) add(ctx context.Context, a Attachment, path string, begun func()) (result *gocni.Result, o outcome) {
	o = p.run(ctx, a.request("ADD", p.limits.Load().Add), func(ctx context.Context, dir string) error {
		defer whenBegun(ctx, dir, begun)()
		cni, err := goCNI(dir, a.Config)
		if err != nil {
			return err
		}
		// Not Setup, which reads answers in goroutines of its own, where no code of ours could
		// recover from them.
		result, err = cni.SetupSerially(ctx, a.ID, path, a.options()...)
		return err
	})
	return result, o
}

// whenBegun calls begun when the first plugin of a run is in its cgroup. The
// function that it returns ends the waiting for that.
func whenBegun(ctx context.Context, dir string, begun func()) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		if begun != nil && runner.AwaitFirst(ctx, dir) {
			begun()
		}
	}()
	return func() {
		cancel()
		<-over
	}
}

// del succeeds if every plugin of the chain does. go-cni takes an error for
// success whose text has "not found" in it, or "no such file or directory"; so
// what the plugins themselves answered counts.
func (p *plugins) del(ctx context.Context, a Attachment, path string) outcome {
	return p.run(ctx, a.request("DEL", p.limits.Load().Del), func(ctx context.Context, dir string) error {
		cni, err := goCNI(dir, a.Config)
		if err != nil {
			return err
		}
		remove := func() error { return recovered(func() error { return cni.Remove(ctx, a.ID, path, a.options()...) }) }
		// What ADD answered is in libcni's cache, where it reads it for DEL; an answer
		// that cannot be decoded is left out: a DEL needs none (CNI SPEC, "DEL").
		if err := remove(); !errors.Is(err, errAnswer) {
			return err
		}
		if err := removeCached(a.Network, a.ID); err != nil {
			return err
		}
		return remove()
	})
}

func (p *plugins) check(ctx context.Context, a Attachment, path string) outcome {
	return p.run(ctx, a.request("CHECK", p.limits.Load().Check), func(ctx context.Context, dir string) error {
		cni, err := goCNI(dir, a.Config)
		if err != nil {
			return err
		}
		return cni.Check(ctx, a.ID, path, a.options()...)
	})
}

func (p *plugins) status(ctx context.Context, c *Configuration) outcome {
	return p.run(ctx, c.request("STATUS", p.limits.Load().Status), func(_ context.Context, dir string) error {
		cni, err := goCNI(dir, c.Bytes)
		if err != nil {
			return err
		}
		return cni.Status()
	})
}

// gc goes through libcni, because go-cni has no GC.
func (p *plugins) gc(ctx context.Context, c *Configuration, valid []types.GCAttachment) outcome {
	return p.run(ctx, c.request("GC", p.limits.Load().GC), func(ctx context.Context, dir string) error {
		list, err := libcni.NetworkConfFromBytes(c.Bytes)
		if err != nil {
			return err
		}
		cni := libcni.NewCNIConfigWithCacheDir([]string{dir}, p.gcCache, nil)
		return cni.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: valid})
	})
}

// goCNI is an instance for one run, so that go-cni's lock couples nothing to
// anything.
func goCNI(dir string, config []byte) (gocni.CNI, error) {
	cni, err := gocni.New(
		gocni.WithPluginDir([]string{dir}),
		gocni.WithMinNetworkCount(1),
		gocni.WithInterfacePrefix("eth"),
		gocni.WithConfListBytes(config),
	)
	if err != nil {
		return nil, fmt.Errorf("load the configuration: %w", err)
	}
	return cni, nil
}

func (a *Attachment) request(verb string, limit time.Duration) runner.Request {
	return runner.Request{Verb: verb, ID: a.ID, Network: a.Network, Plugins: pluginTypes(a.Config), Limit: limit}
}

func (c *Configuration) request(verb string, limit time.Duration) runner.Request {
	return runner.Request{Verb: verb, Network: c.Name, Plugins: c.Plugins, Limit: limit}
}

// pluginTypes are the types of the plugins of a configuration list; of one that
// cannot be decoded is go-cni's to report.
func pluginTypes(config []byte) (names []string) {
	var list struct {
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	_ = json.Unmarshal(config, &list)
	for _, plugin := range list.Plugins {
		names = append(names, plugin.Type)
	}
	return names
}

// run begins a run, calls do with its directory of plugins, and ends the run.
// At the limit, or with the context, everything that the run started is
// killed, and run returns soon after, whatever became of that.
func (p *plugins) run(ctx context.Context, request runner.Request, do func(ctx context.Context, dir string) error) (o outcome) {
	defer func() {
		if o.err != nil {
			o.err = fmt.Errorf("CNI %s of network %q: %w", request.Verb, request.Network, o.err)
		}
	}()
	run, err := p.runner.Begin(request)
	if err != nil {
		if run != nil {
			p.lingering.keep(run)
		}
		return outcome{err: err}
	}
	err, killed := p.follow(ctx, run, do)
	if errors.Is(err, errLeft) {
		return outcome{err: err}
	}
	o.late = killed != nil && ctx.Err() == nil
	reports, readErr := run.Reports()
	o.err = errors.Join(readErr, failure(run, reports, err, killed))
	p.record(ctx, reports, o.err)
	if err := p.end(run, o.err, killed != nil); err != nil {
		o.err = errors.Join(o.err, err)
		o.stuck = run
	}
	return o
}

// record adds a row for each plugin to the timeline of what the run was for.
func (p *plugins) record(ctx context.Context, reports []runner.Report, err error) {
	within := make(map[string]context.Context) // of plugins that called others
	for _, r := range reports {
		ran := row(r, err)
		step.Record(ctx, ran)
		caller := within[r.Parent]
		if caller == nil {
			caller = ctx
		}
		within[ran.Step] = trace.Past(caller, ran.Step, ran.Start, ran.Took, ran.Error, "cni.plugin", r.Plugin, "cni.verb", r.Verb)
		if p.observe != nil {
			p.observe(r.Plugin, r.Verb, ran.Took, ran.Error == "")
		}
	}
}

func row(r runner.Report, err error) step.Row {
	row := step.Row{Kind: "plugin", Step: r.Plugin + " " + r.Verb, Start: r.Start, Took: r.Took, Parent: r.Parent, Plugin: &step.Plugin{
		Name: r.Plugin, Verb: r.Verb, Killed: !r.Ended, Exit: r.Exit, Signal: r.Signal,
		Code: r.Code, Message: r.Message, Details: r.Details, Stderr: r.Stderr,
	}}
	blamed, ok := errors.AsType[*PluginError](err)
	switch {
	case ok && r.Parent == "" == (blamed.Caller == "") && r.Plugin == blamed.Plugin && r.Verb == blamed.Verb:
		row.Error = blamed.Message
	case r.Failed() || r.Answer != "":
		row.Error = r.Text()
	}
	if row.Took == 0 && !r.Ended {
		row.Took = time.Since(r.Start)
	}
	return row
}
