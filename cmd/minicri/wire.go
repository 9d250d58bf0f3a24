package main

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
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

type parts struct {
	machine         machine.Machine
	handlers        *handler.Set
	defaults        oci.Defaults            // of all handlers; a reload keeps them
	handlerDefaults map[string]oci.Defaults // by handler
	hierarchies     cgroup.Hierarchies
	netns, userns   *namespace.Dir
	systemd         bool
	node            *node.Node
	lives           *step.Lives // of pods and containers that are gone
	supervisors     *client.Set
	inForce         *atomic.Pointer[config.Config] // with reloaded keys
	runtime         *server.Runtime
	images          *image.Store
	streams         *stream.Server
	metrics         *metrics.Metrics
	logger          *slog.Logger
	closers         []func() error
}

func wire(ctx context.Context, c *config.Config, logger *slog.Logger) (_ *parts, err error) {
	n := &parts{metrics: metrics.New(), logger: logger}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	if err := n.findKernel(ctx, c); err != nil {
		return nil, err
	}
	if err := n.machine.LabelLayers(image.LayersDir(c.Root)); err != nil {
		return nil, err
	}
	stored := imageConfig(c, logger)
	stored.Observe = n.metrics.ObservePull
	if n.images, err = image.Open(ctx, stored); err != nil {
		return nil, err
	}
	n.onClose(n.images.Close)
	if err := n.wireRuntime(ctx, c); err != nil {
		return nil, err
	}
	s := c.Streaming
	n.streams, err = stream.Listen(ctx, stream.Options{
		Address: s.Address, TLS: stream.TLS{Cert: s.TLSCert, Key: s.TLSKey, SelfSigned: s.SelfSigned},
		Idle: time.Duration(s.Idle), Creation: time.Duration(s.Creation), MaxOpen: s.MaxOpen,
		Containers: n.runtime.Containers, Pods: n.runtime.Sandboxes, Dial: n.netns.Dial, Logger: logger,
	})
	if err != nil {
		return nil, err
	}
	n.onClose(n.streams.Close)
	n.runtime.Streams = n.streams
	n.metrics.Watch(metrics.Sources{
		Version:   version,
		Sandboxes: n.runtime.Sandboxes, Containers: n.runtime.Containers, Networks: n.runtime.Networks, Streams: n.streams.Open, Dropped: n.runtime.Events.Dropped,
		Images: n.images, Root: c.Root, Cadvisor: n.runtime.MeasureForMetrics, Descriptors: stats.Descriptors(),
		Supervisors: func() uint64 { return inspect.SupervisorMemory(c.State) },
	})
	return n, n.runtime.Plugins.Open(n.runtime.Sandboxes, n.runtime.Containers)
}

func (n *parts) onClose(end func() error) { n.closers = append(n.closers, end) }
func (n *parts) onEnd(end func())         { n.onClose(func() error { end(); return nil }) }

// close ends what is under way, the last part first. Pods and images stay.
func (n *parts) close() (err error) {
	for _, end := range slices.Backward(n.closers) {
		err = errors.Join(err, end())
	}
	return err
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

func (n *parts) wireRuntime(ctx context.Context, c *config.Config) (err error) {
	runtime := &server.Runtime{
		Events: server.NewBroadcaster(), Images: n.images, Observe: n.metrics.ObserveCall,
		Info: server.Info{Version: version, Started: time.Now(), SystemdCgroup: n.systemd, Handlers: n.handlers, Machine: n.machine},
	}
	n.runtime = runtime
	if runtime.Networks, err = n.openNetworks(ctx, c); err != nil {
		return err
	}
	n.onEnd(runtime.Networks.Close)
	if runtime.Stats, err = stats.Open(ctx, n.images, n.logger); err != nil {
		return err
	}
	n.onEnd(runtime.Stats.Close)
	nri.SetLogger(n.logger)
	runtime.Plugins = nri.New(nriOptions(c, n.metrics, n.logger))
	n.onEnd(runtime.Plugins.Close)
	if runtime.Sandboxes, err = sandbox.Open(ctx, n.sandboxOptions(c)); err != nil {
		return err
	}
	n.onEnd(runtime.Sandboxes.Close)
	if runtime.Containers, err = container.Open(ctx, n.containerOptions(c)); err != nil {
		return err
	}
	n.onEnd(runtime.Containers.Close)
	// The first pod does not wait for its supervisor.
	limited, cancel := context.WithTimeout(ctx, time.Duration(c.Limits.Kill))
	defer cancel()
	if _, err := n.supervisors.Ensure(limited, n.supervisors.Own()); err != nil {
		n.logger.Error("the supervisor does not start; the first pod retries", "err", err)
	}
	runtime.Sandboxes.Prove()
	runtime.Sandboxes.SetContainers(runtime.Containers)
	return nil
}

func (n *parts) findKernel(ctx context.Context, c *config.Config) (err error) {
	n.inForce = &atomic.Pointer[config.Config]{}
	n.inForce.Store(c)
	if n.machine, err = readMachine(ctx, c.Root, n.logger); err != nil {
		return err
	}
	if err = errors.Join(preflight(c, n.machine)...); err != nil {
		return err
	}
	if n.defaults, err = readDefaults(c, n.machine); err != nil {
		return err
	}
	if n.handlerDefaults, err = handlerDefaults(c, n.defaults); err != nil {
		return err
	}
	n.handlers = openHandlers(ctx, c, n.machine, n.logger)
	if n.hierarchies, err = cgroup.FindHierarchies(); err != nil {
		return err
	}
	n.systemd = systemdCgroup(c)
	if n.node, err = node.Open(c.Root, c.State, c.NetnsDir); err != nil {
		return err
	}
	pod := oci.CgroupsPath(cgroupParent(c, n.systemd), "id", n.systemd)
	if err = n.node.Know(cgroup.Path(pod)); err != nil {
		return err
	}
	if n.netns, err = namespace.Open(c.NetnsDir, n.node.Mark()); err != nil {
		return err
	}
	if n.userns, err = namespace.Open(filepath.Join(c.State, "userns"), n.node.Mark()); err != nil {
		return err
	}
	if n.lives, err = step.OpenLives(filepath.Join(c.Root, "lives")); err != nil {
		return err
	}
	path, err := findShim(c.Shim)
	if err != nil {
		return err
	}
	shim, err := client.OpenProgram(path)
	if err != nil {
		return err
	}
	n.onClose(shim.Close)
	n.supervisors, err = client.NewSet(client.SetOptions{
		Dir:    filepath.Join(c.State, "shims"),
		Start:  client.StartOptions{Binary: shim.Path, Build: shim.Build, Version: version, ForOthers: shim.ForOthers(), SystemdCgroup: n.systemd},
		Answer: time.Duration(c.Limits.Kill), Logger: n.logger,
	})
	if err == nil {
		n.onEnd(n.supervisors.Close)
	}
	return err
}

func openHandlers(ctx context.Context, c *config.Config, m machine.Machine, logger *slog.Logger) *handler.Set {
	set := handler.New(handlerSpecs(c), handler.Features{
		RecursiveReadOnlyMounts: m.RecursiveReadOnly, UserNamespaces: m.UserNamespaces, NetDevices: true, MemoryPolicy: true,
	})
	limited, cancel := context.WithTimeout(ctx, handler.ListLimit)
	defer cancel()
	for _, h := range set.List(limited) {
		if h.Err != nil {
			logger.Warn("pods of a runtime handler cannot run", "handler", h.Name, "err", h.Err)
		}
	}
	return set
}

func handlerSpecs(c *config.Config) map[string]handler.Spec {
	specs := make(map[string]handler.Spec)
	for name, r := range c.Runtimes {
		specs[name] = handler.Spec{Runtime: r.Command(), CNIConf: r.CNIConf, OwnSandbox: r.SandboxPerContainer}
	}
	if c.DefaultRuntime != "" {
		standsFor := specs[c.DefaultRuntime]
		standsFor.Name = c.DefaultRuntime
		specs[""] = standsFor
	}
	return specs
}

func (n *parts) sandboxOptions(c *config.Config) sandbox.Options {
	return sandbox.Options{
		Root: c.Root, State: c.State, Version: version, Node: n.node, Handlers: n.handlers, Kernel: sandbox.NodeKernel{},
		Supervisors: n.supervisors, SystemdCgroup: n.systemd, CgroupParent: cgroupParent(c, n.systemd),
		Machine: n.machine, Defaults: n.defaults, ShmSize: c.ShmSize, Hierarchies: n.hierarchies,
		Networks: n.runtime.Networks, Netns: n.netns, Userns: n.userns, Limits: sandboxLimits(c), Observe: n.metrics.Observe,
		Lives: n.lives, Events: n.runtime, Plugins: n.runtime.Plugins, Logger: n.logger,
	}
}

func (n *parts) containerOptions(c *config.Config) container.Options {
	return container.Options{
		Options: n.sandboxOptions(c), Sandboxes: n.runtime.Sandboxes, Supervisors: n.supervisors, Images: n.images,
		PidsLimit: c.PidsLimit, CDIDirs: c.CDIDirs, HandlerDefaults: n.handlerDefaults,
		Places: &sweep.Places{
			Node: n.node, Hierarchies: n.hierarchies, Netns: n.netns, Userns: n.userns, Root: c.Root, State: c.State, Kill: time.Duration(c.Limits.Kill),
		},
		ObserveExit: n.metrics.ObserveExit, ObserveLost: n.metrics.ObserveLost, Events: n.runtime, Plugins: n.runtime.Plugins,
	}
}

func (n *parts) openNetworks(ctx context.Context, c *config.Config) (*network.CNI, error) {
	parent := "" // systemd owns the cgroups of pods: plugins run in the daemon's
	if !n.systemd {
		parent = cgroupParent(c, false)
	}
	return network.Open(ctx, network.Options{
		ConfDir: c.CNIConf, BinDirs: c.BinDirs(), Root: c.Root, Version: version, CgroupParent: parent, Mark: n.node.PluginMark(), Namespaces: n.netns,
		Default: network.DefaultNetwork(c.DefaultNetwork), Limits: networkLimits(c), Observe: n.metrics.ObservePlugin, Logger: n.logger,
		Later: func(id string, row step.Row) {
			if sb, is := n.runtime.Sandboxes.Get(id); is {
				sb.Rows.Add(row)
			} else if err := n.lives.Append(id, row); err != nil {
				n.logger.Warn("the timeline of a pod does not have what became of its attachment", "sandbox", id, "err", err)
			}
		},
	})
}

// nriOptions needs no metrics and no logger for a reload.
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
