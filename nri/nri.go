package nri

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/ttrpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/sandbox"
)

// Options say where plugins come from and how long they may take.
type Options struct {
	// Socket is where plugins connect, "" for nowhere; PluginDir has those that
	// are started here, ConfigDir their configurations.
	Socket, PluginDir, ConfigDir string
	// Registration bounds the registration of a plugin, Request each answer.
	Registration, Request time.Duration
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
	adaptation *adaptation.Adaptation
	pods       Pods
	containers Containers
	// reloaded are the options with what Reconfigure has changed.
	reloaded atomic.Pointer[Options]
	// started is set when requests may be made.
	started atomic.Bool

	// mu guards what follows.
	mu sync.Mutex
	// podsMade and containersMade are what plugins were asked about and no other
	// caller may see yet, by id.
	podsMade       map[string]*sandbox.Sandbox
	containersMade map[string]*api.Container
	// failed are the plugins whose answers were these errors, by their texts.
	failed map[string]string
	// uncounted are requests that were made only to see which plugins there are
	// (see Connected).
	uncounted atomic.Int64
}

// New makes the plugins; none is asked before Open.
func New(options Options) (*Plugins, error) {
	p := &Plugins{
		options: options, podsMade: make(map[string]*sandbox.Sandbox),
		containersMade: make(map[string]*api.Container), failed: make(map[string]string),
	}
	p.Reconfigure(options)
	nrilog.Set(logger{options.Logger}) // a variable of the library, as the limits are
	choices := []adaptation.Option{
		adaptation.WithPluginPath(options.PluginDir),
		adaptation.WithPluginConfigPath(options.ConfigDir),
		adaptation.WithSocketPath(options.Socket),
		adaptation.WithMetrics(measures{p}),
		adaptation.WithTTRPCOptions([]ttrpc.ClientOpts{ttrpc.WithUnaryClientInterceptor(ask)}, nil),
		adaptation.WithBuiltinPlugins(p.validation(), roll()),
	}
	if options.Socket == "" {
		choices = append(choices, adaptation.WithDisabledExternalConnections())
	}
	var err error
	if p.adaptation, err = adaptation.New("minicri", options.Version, p.synchronize, p.updateUnsolicited, choices...); err != nil {
		return nil, fmt.Errorf("NRI: %w", err)
	}
	return p, nil
}

// Reconfigure puts other limits, required plugins and rejected adjustments into
// force, for requests that begin from now on. Where plugins come from stays. It does
// nothing where NRI is off.
func (p *Plugins) Reconfigure(options Options) {
	if p == nil {
		return
	}
	// The library keeps both limits in variables of its own; there is one adaptation
	// in a process.
	adaptation.SetPluginRegistrationTimeout(options.Registration)
	adaptation.SetPluginRequestTimeout(options.Request)
	p.reloaded.Store(&options)
}

// settings are the limits and rules that are in force.
func (p *Plugins) settings() *Options { return p.reloaded.Load() }

// Open starts the plugins of the directory, synchronizes them with the pods and
// containers that there are, and listens for others.
func (p *Plugins) Open(pods Pods, containers Containers) error {
	p.pods, p.containers = pods, containers
	if err := checkSocket(p.options.Socket); err != nil {
		return err
	}
	if err := p.adaptation.Start(); err != nil {
		p.adaptation.Stop()
		return fmt.Errorf("start NRI with the plugins of %s and the socket %s: %w", p.options.PluginDir, p.options.Socket, err)
	}
	p.started.Store(true)
	return nil
}

// checkSocket refuses the socket of another runtime: the library would remove it.
func checkSocket(path string) error {
	if path == "" {
		return nil
	}
	if err := socket.CheckFree(path); err != nil {
		return fmt.Errorf("nri.socket: %w: stop the runtime that uses it, or set another path", err)
	}
	return nil
}

// Close ends the plugins that were started here and disconnects the others.
func (p *Plugins) Close() {
	if p == nil || !p.started.Swap(false) {
		return
	}
	p.adaptation.Stop()
}

// logger hands the library's log to ours.
type logger struct{ log *slog.Logger }

func (l logger) Debugf(_ context.Context, format string, args ...any) {
	l.write(slog.LevelDebug, format, args)
}

func (l logger) Infof(_ context.Context, format string, args ...any) {
	l.write(slog.LevelDebug, format, args)
}

func (l logger) Warnf(_ context.Context, format string, args ...any) {
	l.write(slog.LevelWarn, format, args)
}

func (l logger) Errorf(_ context.Context, format string, args ...any) {
	l.write(slog.LevelWarn, format, args)
}

func (l logger) write(level slog.Level, format string, args []any) {
	l.log.Log(context.Background(), level, "NRI: "+fmt.Sprintf(format, args...))
}
