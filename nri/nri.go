package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/semaphore"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/sandbox"
)

// Source is where plugins come from.
type Source struct {
	Enabled bool // there may be plugins
	// Socket is where plugins connect, "" for nowhere. PluginDir holds those that we start,
	// ConfigDir their configurations.
	Socket, PluginDir, ConfigDir string
}

// Options say where plugins come from and how long they may take.
type Options struct {
	Source
	// Registration bounds the registration of a plugin, Request each answer.
	Registration, Request time.Duration
	State                 string // the volatile directory
	Version               string // the daemon's, for plugins
	// Required are the plugins without which no pod and no container is made. Tolerate is the
	// annotation of pods that do without; "" for none.
	Required []string
	Tolerate string
	Reject   []string // the kinds of adjustments that no plugin may make
	Metrics  Metrics
	Logger   *slog.Logger
}

// Metrics count requests and plugins.
type Metrics interface {
	NRIRequest(plugin, request, outcome string) // ok, error, timeout or lost
	NRILatency(plugin, request string, took time.Duration)
	NRIPlugins(count int) // that are connected
}

// Pods are the pods that a plugin is synchronized with.
type Pods interface {
	List() []*sandbox.Sandbox
	NetnsPath(sb *sandbox.Sandbox) string
	UsernsPath(sb *sandbox.Sandbox) string
}

// Containers are the containers that a plugin is synchronized with, and may update.
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
	reloaded   atomic.Pointer[Options] // with the changes of Reconfigure
	door       atomic.Pointer[door]    // nil while NRI is off

	switching sync.Mutex // held while NRI is switched on or off
	source    Source     // where plugins come from now; of switching
	opened    bool       // of switching

	asking   *semaphore.Weighted // held while plugins are asked about something
	failed   error               // the last error; of asking
	failedBy string              // its plugin; of asking
	updaters []string            // plugins that answered with updates; of asking

	mu   sync.Mutex
	away map[string]struct{} // had connected by themselves when NRI was switched off; of mu
	// taken is why plugins cannot connect: another runtime served the socket at the start; of mu
	taken error
}

// New returns plugins of which none is asked before Open.
func New(options Options) *Plugins {
	p := &Plugins{options: options, away: make(map[string]struct{}), asking: semaphore.NewWeighted(1)}
	p.reloaded.Store(&options)
	return p
}

func (p *Plugins) settings() *Options { return p.reloaded.Load() }

// request asks the plugins about something, and returns those that answered with updates. note
// records it first, under door.mu, for a plugin that is synchronized later. A plugin that joins
// waits for the requests that have begun, and others wait for it. Off or without a plugin, NRI asks
// nothing, so that a node without plugins does not pay for the messages.
func (p *Plugins) request(
	ctx context.Context, note func(*door), ask func(*adaptation.Adaptation) error,
) (updaters []string, err error) {
	return p.enter(ctx, note, (*door).hasJoined, ask)
}

// validate is request for what the library's own validator decides also without a plugin.
func (p *Plugins) validate(
	ctx context.Context, note func(*door), ask func(*adaptation.Adaptation) error,
) (updaters []string, err error) {
	return p.enter(ctx, note, func(*door) bool { return true }, ask)
}

func (p *Plugins) enter(
	ctx context.Context, note func(*door), asks func(*door) bool, ask func(*adaptation.Adaptation) error,
) (updaters []string, err error) {
	d := p.door.Load()
	if d == nil {
		return nil, nil
	}
	unblock, err := blockSync(ctx, d.adaptation)
	if err != nil {
		return nil, err
	}
	defer unblock()
	d.mu.Lock()
	note(d)
	asked := asks(d)
	d.mu.Unlock()
	if !asked {
		return nil, nil
	}
	if p.asking.Acquire(ctx, 1) != nil {
		return nil, fmt.Errorf("NRI: wait for the plugins, which are asked about something else: %w", context.Cause(ctx))
	}
	defer p.asking.Release(1)
	p.updaters, p.failed, p.failedBy = nil, nil, ""
	if err = ask(d.adaptation); err != nil && errors.Is(err, p.failed) {
		err = fmt.Errorf("NRI plugin %s: %w", p.failedBy, err) // the library leaves the name out
	} else if err != nil {
		err = fmt.Errorf("NRI: %w", err)
	}
	return p.updaters, err
}

// blockSync has plugins that join wait. It waits itself while one is synchronized, and gives up with its context: the
// library's lock does not.
func blockSync(ctx context.Context, to *adaptation.Adaptation) (unblock func(), err error) {
	blocked := make(chan *adaptation.PluginSyncBlock)
	go func() {
		block := to.BlockPluginSync()
		select {
		case blocked <- block:
		case <-ctx.Done():
			block.Unblock()
		}
	}()
	select {
	case block := <-blocked:
		return block.Unblock, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("NRI: wait for a plugin that is synchronized: %w", context.Cause(ctx))
	}
}

// notify makes a request to which plugins answer at most an error.
func (p *Plugins) notify(ctx context.Context, ask func(*adaptation.Adaptation) error) error {
	_, err := p.request(ctx, func(*door) {}, ask)
	return err
}

// Enabled reports whether NRI is on.
func (p *Plugins) Enabled() bool { return p != nil && p.door.Load() != nil }

// SetLogger redirects the library's log. It takes no lock: call it once, before Open.
func SetLogger(log *slog.Logger) { nrilog.Set(logger{log}) }

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

// Open starts the plugins of the directory, synchronizes them, and listens for others, if NRI is
// enabled. From here on Reconfigure may switch it on and off. NRI is on by default and its socket is
// at a fixed path, so a socket of another runtime does not fail the start: Problems reports it.
func (p *Plugins) Open(pods Pods, containers Containers) error {
	p.pods, p.containers = pods, containers
	p.switching.Lock()
	p.opened = true
	p.switching.Unlock()
	options := p.options
	if err := CheckSocket(options.Socket); options.Enabled && errors.Is(err, socket.ErrInUse) {
		options.Logger.Warn("NRI plugins cannot connect to minicri", "err", err)
		options.Socket = ""
		p.mu.Lock()
		p.taken = err
		p.mu.Unlock()
	}
	return p.Reconfigure(options)
}

// Reconfigure changes limits, required plugins and rejected adjustments, for requests that begin
// from now on. If the source changes, the old plugins end or are disconnected before new ones are
// synchronized and asked. After an error the plugins are as before, or NRI is off: see InForce.
func (p *Plugins) Reconfigure(options Options) error {
	p.switching.Lock()
	defer p.switching.Unlock()
	// The library keeps both limits in global variables.
	adaptation.SetPluginRegistrationTimeout(options.Registration)
	adaptation.SetPluginRequestTimeout(options.Request)
	p.reloaded.Store(&options)
	if !p.opened || options.Source == p.source || !options.Enabled && !p.source.Enabled {
		return nil
	}
	if options.Enabled && options.Socket != p.source.Socket {
		if err := CheckSocket(options.Socket); err != nil {
			return err
		}
	}
	p.stop()
	if options.Socket != "" {
		p.mu.Lock()
		p.taken = nil
		p.mu.Unlock()
	}
	if !options.Enabled {
		return nil
	}
	return p.start(options.Source)
}

// InForce returns where plugins come from now.
func (p *Plugins) InForce() Source {
	p.switching.Lock()
	defer p.switching.Unlock()
	return p.source
}

// Close ends the plugins that we started and disconnects the others. None is asked any more.
func (p *Plugins) Close() {
	p.switching.Lock()
	defer p.switching.Unlock()
	p.opened = false
	p.stop()
}

// CheckSocket refuses a socket on which another runtime listens: openDoor would remove it.
func CheckSocket(path string) error {
	if path == "" {
		return nil
	}
	if err := socket.CheckFree(path); err != nil {
		return fmt.Errorf("nri.socket: %w: stop the runtime that uses it, or set another path", err)
	}
	return nil
}

// start switches NRI on, and returns when the plugins of the directory have joined or failed.
// Requests do not wait for that. p.switching is held.
func (p *Plugins) start(source Source) error {
	d, err := p.openDoor(source)
	if err != nil {
		return fmt.Errorf("open the socket of NRI plugins (nri.socket): %w", err)
	}
	if d.adaptation, err = p.adapt(d); err != nil {
		d.close()
		return fmt.Errorf("start NRI with the socket %s: %w", source.Socket, err)
	}
	p.source = source
	p.door.Store(d)
	if d.listener != nil {
		d.wait.Go(func() {
			for {
				conn, err := d.listener.Accept()
				if err != nil {
					return // the door is shut
				}
				d.enter(&link{plugin: conn})
			}
		})
	}
	p.launchAll(d, source)
	return nil
}

// adapt starts the library, which listens on the door's socket.
func (p *Plugins) adapt(d *door) (*adaptation.Adaptation, error) {
	synchronize := func(ctx context.Context, send adaptation.SyncCB) error { return p.synchronize(ctx, d, send) }
	update := func(ctx context.Context, updates []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) {
		if d.off.Err() != nil {
			return updates, errors.New("NRI has been switched off")
		}
		return p.updateUnsolicited(ctx, updates)
	}
	a, err := adaptation.New("minicri", p.options.Version, synchronize, update,
		adaptation.WithPluginPath(""), // we start them
		adaptation.WithSocketPath(d.library),
		adaptation.WithMetrics(measures{p}),
		adaptation.WithTTRPCOptions([]ttrpc.ClientOpts{ttrpc.WithUnaryClientInterceptor(d.ask)}, []ttrpc.ServerOpt{ttrpc.WithUnaryServerInterceptor(d.hear)}),
		adaptation.WithBuiltinPlugins(p.validation()),
	)
	if err != nil {
		return nil, err
	}
	if err := a.Start(); err != nil {
		a.Stop()
		return nil, err
	}
	return a, nil
}

// stop switches NRI off: plugins that we started end, others are disconnected and have to come back
// by themselves. Pending requests end as if the plugins had died. p.switching is held.
func (p *Plugins) stop() {
	d := p.door.Swap(nil)
	if d == nil {
		return
	}
	external := d.close()
	// A plugin that is being synchronized would otherwise connect after Stop.
	block := d.adaptation.BlockPluginSync()
	d.adaptation.Stop()
	block.Unblock()
	p.source = Source{}
	p.options.Metrics.NRIPlugins(0)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, plugin := range external {
		p.away[plugin] = struct{}{}
	}
}
