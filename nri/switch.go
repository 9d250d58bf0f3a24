package nri

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/ttrpc"

	"github.com/minicri/minicri/internal/socket"
)

// Open starts the plugins of the directory, synchronizes them with the pods and
// containers that there are, and listens for others, if NRI is on; Reconfigure may
// switch it on and off from here on.
func (p *Plugins) Open(pods Pods, containers Containers) error {
	p.pods, p.containers = pods, containers
	p.switching.Lock()
	p.opened = true
	p.switching.Unlock()
	return p.Reconfigure(p.options)
}

// Reconfigure puts other limits, required plugins and rejected adjustments into
// force, for requests that begin from now on. If plugins come from elsewhere,
// those that there are end or are disconnected before others are asked: these are
// synchronized with the pods and containers that there are. After an error the
// plugins are as before, or NRI is off; InForce has which.
func (p *Plugins) Reconfigure(options Options) error {
	p.switching.Lock()
	defer p.switching.Unlock()
	// The library keeps both limits in variables of its own; there is one adaptation
	// in a process.
	adaptation.SetPluginRegistrationTimeout(options.Registration)
	adaptation.SetPluginRequestTimeout(options.Request)
	p.reloaded.Store(&options)
	if !p.opened || options.Source == p.source || !options.Enabled && !p.source.Enabled {
		return nil
	}
	if options.Enabled && options.Socket != p.source.Socket {
		if err := checkSocket(options.Socket); err != nil {
			return err
		}
	}
	p.stop()
	if !options.Enabled {
		return nil
	}
	return p.start(options.Source)
}

// InForce is where plugins come from now.
func (p *Plugins) InForce() Source {
	p.switching.Lock()
	defer p.switching.Unlock()
	return p.source
}

// Close ends the plugins that were started here and disconnects the others; none is
// asked any more.
func (p *Plugins) Close() {
	p.switching.Lock()
	defer p.switching.Unlock()
	p.opened = false
	p.stop()
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

// start switches NRI on. The adaptation is for requests when the plugins of the
// directory are synchronized: requests do not wait for one that does not register.
// p.switching is held.
func (p *Plugins) start(source Source) error {
	dir, err := p.choose(source)
	if err != nil {
		return fmt.Errorf("the plugins of %s (nri.plugin_dir): %w", source.PluginDir, err)
	}
	choices := []adaptation.Option{
		adaptation.WithPluginPath(dir),
		adaptation.WithPluginConfigPath(source.ConfigDir),
		adaptation.WithSocketPath(source.Socket),
		adaptation.WithMetrics(measures{p}),
		adaptation.WithTTRPCOptions([]ttrpc.ClientOpts{ttrpc.WithUnaryClientInterceptor(ask)}, nil),
		adaptation.WithBuiltinPlugins(p.validation(), roll()),
	}
	if source.Socket == "" {
		choices = append(choices, adaptation.WithDisabledExternalConnections())
	}
	ended := make(chan struct{})
	synchronize := func(ctx context.Context, send adaptation.SyncCB) error {
		select {
		case <-ended:
			return errors.New("NRI has been switched off") // the library disconnects it
		default:
			return p.synchronize(ctx, send)
		}
	}
	a, err := adaptation.New("minicri", p.options.Version, synchronize, p.updateUnsolicited, choices...)
	if err != nil {
		return fmt.Errorf("NRI: %w", err)
	}
	if err := a.Start(); err != nil {
		a.Stop()
		return fmt.Errorf("start NRI with the plugins of %s and the socket %s: %w", source.PluginDir, source.Socket, err)
	}
	p.source, p.end = source, func() {
		close(ended)
		// One that is being synchronized would be connected after the end.
		block := a.BlockPluginSync()
		defer block.Unblock()
		a.Stop()
	}
	p.adaptation.Store(a)
	return nil
}

// stop switches NRI off: plugins that were started here end, others are
// disconnected. What they are being asked ends as if they had died. p.switching is
// held.
func (p *Plugins) stop() {
	if p.adaptation.Swap(nil) == nil {
		return
	}
	p.end()
	p.source = Source{}
	p.options.Metrics.NRIPlugins(0)
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.podsMade)
	clear(p.containersMade)
	p.launched, p.skipped = nil, nil
}
