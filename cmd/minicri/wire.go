package main

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/metrics"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/nri"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/server"
	"github.com/minicri/minicri/stats"
	"github.com/minicri/minicri/stream"
	"github.com/minicri/minicri/supervisor/client"
)

// wire puts the packages together.
func wire(ctx context.Context, c *config.Config, logger *slog.Logger) (*parts, error) {
	k, err := findKernel(ctx, c, logger)
	if err != nil {
		return nil, err
	}
	measured, stored := metrics.New(), imageConfig(c, logger)
	stored.Observe = func(pull image.PullResult) {
		measured.ObservePull(pull.Took, pull.Bytes, pull.Err) // the line of the log is its caller's, who knows for which pod
	}
	if err := k.machine.LabelLayers(image.LayersDir(c.Root)); err != nil {
		return nil, errors.Join(err, k.shim.Close())
	}
	images, err := image.Open(ctx, stored)
	if err != nil {
		return nil, errors.Join(err, k.shim.Close())
	}
	runtime, err := wireRuntime(ctx, c, k, images, measured, logger)
	if err != nil {
		return nil, errors.Join(err, images.Close(), k.shim.Close())
	}
	streams, err := stream.Listen(ctx, streamOptions(c, k, runtime, logger))
	if err != nil {
		runtime.Sandboxes.Close()
		runtime.Containers.Close()
		return nil, errors.Join(err, images.Close(), k.shim.Close())
	}
	runtime.Streams = streams
	measured.Watch(metrics.Sources{
		Version:   version,
		Sandboxes: runtime.Sandboxes, Containers: runtime.Containers, Networks: runtime.Networks, Streams: streams.Open, Dropped: runtime.Events.Dropped,
		Images: images, Root: c.Root, Cadvisor: runtime.MeasureForMetrics, Descriptors: stats.Descriptors(),
	})
	n := &parts{kernel: k, runtime: runtime, images: images, streams: streams, metrics: measured}
	if err := runtime.Plugins.Open(runtime.Sandboxes, runtime.Containers); err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// parts are what the daemon consists of.
type parts struct {
	kernel
	runtime *server.Runtime
	images  *image.Store
	streams *stream.Server
	metrics *metrics.Metrics
}

// inspect is what people may ask of the daemon.
func (n *parts) inspect(c *config.Config) *inspect.Node {
	return &inspect.Node{
		Root: c.Root, State: c.State, Sandboxes: n.runtime.Sandboxes, Containers: n.runtime.Containers, Networks: n.runtime.Networks, Lives: n.lives,
		Measure: n.runtime.MeasurePods,
	}
}

// close ends what is under way; pods and images stay.
func (n *parts) close() error {
	err := n.streams.Close()
	n.runtime.Networks.Close()
	n.runtime.Sandboxes.Close()
	n.runtime.Containers.Close()
	n.runtime.Plugins.Close()
	n.supervisors.Close()
	n.runtime.Stats.Close()
	return errors.Join(err, n.images.Close(), n.shim.Close())
}

func streamOptions(c *config.Config, k kernel, runtime *server.Runtime, logger *slog.Logger) stream.Options {
	s := c.Streaming
	return stream.Options{
		Address: s.Address, TLS: stream.TLS{Cert: s.TLSCert, Key: s.TLSKey, SelfSigned: s.SelfSigned},
		Idle: time.Duration(s.Idle), Creation: time.Duration(s.Creation), MaxOpen: s.MaxOpen,
		Containers: runtime.Containers, Pods: runtime.Sandboxes, Netns: k.netns,
		Logger: logger,
	}
}

func imageConfig(c *config.Config, logger *slog.Logger) image.Config {
	i := c.Images
	return image.Config{
		VerifierTimeout: time.Duration(i.VerifierTimeout), MinRate: int64(i.MinRate), VolumesDir: filepath.Join(c.Root, "container-volumes"),
		Root: c.Root, CertsDirs: i.CertsDirs, DockerConfig: i.DockerConfig, VerifierDir: i.VerifierDir, Pinned: i.Pinned,
		ProgressTimeout: time.Duration(i.ProgressTimeout), MaxDownloads: i.MaxDownloads, KeepLayers: i.KeepLayers,
		Logger: logger,
	}
}

// kernel is what the machine has and where our things in it are.
type kernel struct {
	machine  machine.Machine
	handlers *handler.Set
	// defaults are those of all runtime handlers, which a reload does not change.
	defaults oci.Defaults
	// handlerDefaults are those of runtime handlers, by name.
	handlerDefaults map[string]oci.Defaults
	hierarchies     cgroup.Hierarchies
	netns, userns   *namespace.Dir
	systemd         bool
	node            *node.Node
	shim            *client.Program
	// lives keeps the timelines of pods and containers that are gone.
	lives       *step.Lives
	supervisors *client.Set
	// inForce is the configuration with what was reloaded.
	inForce *atomic.Pointer[config.Config]
}

func wireRuntime(ctx context.Context, c *config.Config, k kernel, images *image.Store, measured *metrics.Metrics, logger *slog.Logger) (_ *server.Runtime, err error) {
	runtime := &server.Runtime{
		Events: server.NewBroadcaster(), Observe: measured.ObserveCall,
		Info: server.Info{Version: version, SystemdCgroup: k.systemd, Handlers: k.handlers, Machine: k.machine},
	}
	if runtime.Networks, err = openNetworks(ctx, c, k, measured, logger); err != nil {
		return nil, err
	}
	if runtime.Stats, err = stats.Open(ctx, images, logger); err != nil {
		return nil, err
	}
	nri.SetLogger(logger)
	runtime.Plugins = nri.New(nriOptions(c, measured, logger))
	if runtime.Sandboxes, err = sandbox.Open(ctx, sandboxOptions(c, k, runtime, measured, logger)); err != nil {
		return nil, err
	}
	if runtime.Containers, err = container.Open(ctx, containerOptions(c, k, runtime, images, measured, logger)); err != nil {
		runtime.Sandboxes.Close()
		return nil, err
	}
	startSupervisor(ctx, c, k, logger)
	runtime.Sandboxes.Prove()
	runtime.Sandboxes.SetContainers(runtime.Containers)
	return runtime, nil
}

func findKernel(ctx context.Context, c *config.Config, logger *slog.Logger) (k kernel, err error) {
	k.inForce = &atomic.Pointer[config.Config]{}
	k.inForce.Store(c)
	if k.machine, err = readMachine(ctx, c.Root, logger); err != nil {
		return k, err
	}
	if err = errors.Join(preflight(c, k.machine)...); err != nil {
		return k, err
	}
	if k.defaults, err = readDefaults(c, k.machine); err != nil {
		return k, err
	}
	if k.handlerDefaults, err = handlerDefaults(c, k.defaults); err != nil {
		return k, err
	}
	k.handlers = openHandlers(c, k.machine, logger)
	if k.hierarchies, err = cgroup.FindHierarchies(); err != nil {
		return k, err
	}
	k.systemd = systemdCgroup(c)
	if k.node, err = openNode(c, k.systemd); err != nil {
		return k, err
	}
	if k.netns, err = namespace.Open(c.NetnsDir, k.node.Mark()); err != nil {
		return k, err
	}
	if k.userns, err = namespace.Open(filepath.Join(c.State, "userns"), k.node.Mark()); err != nil {
		return k, err
	}
	if k.lives, err = step.OpenLives(filepath.Join(c.Root, "lives")); err != nil {
		return k, err
	}
	path, err := findShim(c.Shim)
	if err != nil {
		return k, err
	}
	if k.shim, err = client.OpenProgram(path); err != nil {
		return k, err
	}
	k.supervisors, err = openSupervisors(c, k, logger)
	return k, err
}

// openHandlers says at the start which handlers cannot run pods; Status does as
// long as it is so.
func openHandlers(c *config.Config, m machine.Machine, logger *slog.Logger) *handler.Set {
	set := handler.New(handlerSpecs(c), handler.Features{
		RecursiveReadOnlyMounts: m.RecursiveReadOnly, UserNamespaces: m.UserNamespaces, NetDevices: true, MemoryPolicy: true,
	})
	for _, h := range set.List(context.Background()) {
		if h.Err != nil {
			logger.Warn("pods of a runtime handler cannot run", "handler", h.Name, "err", h.Err)
		}
	}
	return set
}

// handlerSpecs are the runtime handlers of a configuration.
func handlerSpecs(c *config.Config) map[string]handler.Spec {
	specs := make(map[string]handler.Spec)
	for name, runtime := range c.Runtimes {
		specs[name] = handler.Spec{
			Program: runtime.Program(), CNIConf: runtime.CNIConf, OwnSandbox: runtime.SandboxPerContainer,
		}
	}
	if c.DefaultRuntime != "" {
		standsFor := specs[c.DefaultRuntime]
		standsFor.Name = c.DefaultRuntime
		specs[""] = standsFor
	}
	return specs
}

func sandboxOptions(c *config.Config, k kernel, runtime *server.Runtime, measured *metrics.Metrics, logger *slog.Logger) sandbox.Options {
	return sandbox.Options{
		Root: c.Root, State: c.State, Version: version, Node: k.node, Handlers: k.handlers,
		Supervisors: k.supervisors, Group: k.supervisors.Own(),
		SystemdCgroup: k.systemd, CgroupParent: cgroupParent(c, k.systemd),
		Machine: k.machine, Defaults: k.defaults, ShmSize: c.ShmSize, Hierarchies: k.hierarchies, Networks: runtime.Networks, Netns: k.netns, Userns: k.userns,
		Limits:  sandboxLimits(c),
		Observe: measured.Observe,
		Lives:   k.lives,
		Events:  runtime,
		Plugins: runtime.Plugins,
		Logger:  logger,
	}
}

func containerOptions(c *config.Config, k kernel, runtime *server.Runtime, images *image.Store, measured *metrics.Metrics, logger *slog.Logger) container.Options {
	return container.Options{
		Root: c.Root, State: c.State, Version: version, Node: k.node, Supervisors: k.supervisors,
		SystemdCgroup: k.systemd, CgroupParent: cgroupParent(c, k.systemd), PidsLimit: c.PidsLimit, CDIDirs: c.CDIDirs,
		Machine: k.machine, Defaults: k.defaults, HandlerDefaults: k.handlerDefaults, Hierarchies: k.hierarchies, Places: places(c, k), Sandboxes: runtime.Sandboxes, Handlers: k.handlers, Images: images,
		Limits:  containerLimits(c),
		Observe: measured.Observe, ObserveExit: measured.ObserveExit, ObserveLost: measured.ObserveLost,
		Lives:   k.lives,
		Events:  runtime,
		Plugins: runtime.Plugins,
		Logger:  logger,
	}
}

// places are where pods and containers of this node leave things.
func places(c *config.Config, k kernel) *sweep.Places {
	return &sweep.Places{
		Node: k.node, Hierarchies: k.hierarchies, Netns: k.netns, Userns: k.userns, Root: c.Root, State: c.State, Kill: time.Duration(c.Limits.Kill),
	}
}

func openNetworks(ctx context.Context, c *config.Config, k kernel, measured *metrics.Metrics, logger *slog.Logger) (*network.CNI, error) {
	return network.Open(ctx, network.Options{
		ConfDir: c.CNIConf, Directories: c.CNIConfDirs(), BinDirs: c.BinDirs(), Root: c.Root, CgroupParent: pluginCgroup(c), Mark: k.node.PluginMark(), Namespaces: k.netns,
		Default: network.DefaultNetwork(c.DefaultNetwork),
		Limits:  networkLimits(c),
		Observe: measured.ObservePlugin,
		Later: func(id string, row step.Row) {
			if err := k.lives.Append(id, row); err != nil {
				logger.Warn("the timeline of a pod does not have what became of its attachment", "sandbox", id, "err", err)
			}
		},
		Logger: logger,
	})
}

// nriOptions are those of a configuration; a reload needs no measured and no logger.
func nriOptions(c *config.Config, measured *metrics.Metrics, logger *slog.Logger) nri.Options {
	n := c.NRI
	return nri.Options{
		Source:       nriSource(c),
		Registration: time.Duration(n.Registration), Request: time.Duration(n.Request),
		State: c.State, Version: version, Required: n.Required, Tolerate: n.Tolerate, Reject: n.Reject,
		Metrics: measured, Logger: logger,
	}
}

func nriSource(c *config.Config) nri.Source {
	n := c.NRI
	return nri.Source{Enabled: n.Enabled, Socket: n.Socket, PluginDir: n.PluginDir, ConfigDir: n.ConfigDir}
}

// openSupervisors finds the supervisors of an earlier daemon.
func openSupervisors(c *config.Config, k kernel, logger *slog.Logger) (*client.Set, error) {
	return client.NewSet(client.SetOptions{
		Dir:    filepath.Join(c.State, "shims"),
		Start:  client.StartOptions{Binary: k.shim.Path(), Build: k.shim.Build(), Version: version, ForOthers: k.shim.ForOthers(), SystemdCgroup: k.systemd},
		Answer: time.Duration(c.Limits.Kill), Logger: logger,
	})
}

// startSupervisor has this build's supervisor serve before the first pod asks for
// it. One that does not start now is started by that pod.
func startSupervisor(ctx context.Context, c *config.Config, k kernel, logger *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.Limits.Kill))
	defer cancel()
	if _, err := k.supervisors.Ensure(ctx, k.supervisors.Own()); err != nil {
		logger.Error("the supervisor does not start; the first pod retries", "err", err)
	}
}
