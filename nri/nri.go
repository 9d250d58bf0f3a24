package nri

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	nrilog "github.com/containerd/nri/pkg/log"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
	"golang.org/x/sync/semaphore"
)

// Source is where plugins come from.
type Source struct {
	// Enabled is whether there are any.
	Enabled bool
	// Socket is where plugins connect, "" for nowhere; PluginDir has those that
	// are started here, ConfigDir their configurations.
	Socket, PluginDir, ConfigDir string
}

// Options say where plugins come from and how long they may take.
type Options struct {
	Source
	// Registration bounds the registration of a plugin, Request each answer.
	Registration, Request time.Duration
	// State is the volatile directory.
	State string
	// Version is the daemon's, which plugins are given.
	Version string
	// Required are the names of plugins without which no pod and no container is
	// made. Tolerate is the annotation of pods that do without; "" for none.
	Required []string
	Tolerate string
	// Reject are the kinds of adjustments that no plugin may make.
	Reject []string
	// Metrics count each request to a plugin.
	Metrics Metrics
	Logger  *slog.Logger
}

// Metrics count requests and plugins.
type Metrics interface {
	// NRIRequest notes a request that has ended; outcome is ok, error, timeout
	// or lost.
	NRIRequest(plugin, request, outcome string)
	// NRILatency notes how long a plugin took.
	NRILatency(plugin, request string, took time.Duration)
	// NRIPlugins notes how many plugins are connected.
	NRIPlugins(count int)
}

// Pods are the pods that a plugin is synchronized with.
type Pods interface {
	List() []*sandbox.Sandbox
	NetnsPath(sb *sandbox.Sandbox) string
	UsernsPath(sb *sandbox.Sandbox) string
}

// Containers are the containers that a plugin is synchronized with, and may
// update.
type Containers interface {
	List() []*container.Container
	Spec(c *container.Container) (*specs.Spec, error)
	UpdateUnsolicited(ctx context.Context, id string, wanted *runtimeapi.LinuxContainerResources) error
}

// Plugins are the NRI plugins of this node.
type Plugins struct {
	options    Options
	pods       Pods
	containers Containers
	// reloaded are the options with what Reconfigure has changed.
	reloaded atomic.Pointer[Options]
	// door is where plugins come in, nil while NRI is off.
	door atomic.Pointer[door]

	// switching is held while NRI is switched on or off, and guards source, where
	// plugins come from now, and opened.
	switching sync.Mutex
	source    Source
	opened    bool

	// asking is held while plugins are asked about something, as the library does, and
	// guards what they have answered: the last error, and who wants updates.
	asking   *semaphore.Weighted
	failed   failure
	updaters []string

	mu sync.Mutex
	// away are those that had connected by themselves when NRI was switched off; of mu.
	away map[string]struct{}
}

// New makes the plugins; none is asked before Open.
func New(options Options) *Plugins {
	p := &Plugins{options: options, away: make(map[string]struct{}), asking: semaphore.NewWeighted(1)}
	p.reloaded.Store(&options)
	return p
}

// settings are the limits and rules that are in force.
func (p *Plugins) settings() *Options { return p.reloaded.Load() }

// request asks the plugins about something that is noted by note first, under door.mu: a
// plugin that is synchronized later finds it, one that was before is asked. A plugin that
// joins waits for the requests that have begun, and others wait for it. It returns the
// plugins whose answers have updates. While NRI is off nothing is asked.
func (p *Plugins) request(ctx context.Context, note func(*door), ask func(*adaptation.Adaptation) error) (updaters []string, err error) {
	d := p.door.Load()
	if d == nil {
		return nil, nil
	}
	block := d.adaptation.BlockPluginSync()
	defer block.Unblock()
	d.mu.Lock()
	note(d)
	d.mu.Unlock()
	if p.asking.Acquire(ctx, 1) != nil {
		return nil, fmt.Errorf("NRI: wait for the plugins, which are asked about something else: %w", context.Cause(ctx))
	}
	defer p.asking.Release(1)
	p.updaters, p.failed = nil, failure{}
	err = p.named(ask(d.adaptation))
	return p.updaters, err
}

func nothing(*door) {}

// notify makes a request that no plugin answers with more than an error.
func (p *Plugins) notify(ctx context.Context, ask func(*adaptation.Adaptation) error) error {
	_, err := p.request(ctx, nothing, ask)
	return err
}

// Enabled reports whether there may be plugins now.
func (p *Plugins) Enabled() bool { return p != nil && p.door.Load() != nil }

// SetLogger makes what the library logs lines of this log. That is a variable of the
// library without a lock: it is set once, before Open.
func SetLogger(log *slog.Logger) { nrilog.Set(logger{log}) }

// logger hands the library's log to ours.
type logger struct{ log *slog.Logger }

func (l logger) Debugf(_ context.Context, format string, args ...any) {
	l.log.Debug("NRI: " + fmt.Sprintf(format, args...))
}

func (l logger) Infof(ctx context.Context, format string, args ...any) {
	l.Debugf(ctx, format, args...)
}

func (l logger) Warnf(_ context.Context, format string, args ...any) {
	l.log.Warn("NRI: " + fmt.Sprintf(format, args...))
}

func (l logger) Errorf(ctx context.Context, format string, args ...any) {
	if !slices.Contains(args, any(adaptation.ErrWasmDisabled)) { // as it was built
		l.Warnf(ctx, format, args...)
	}
}
