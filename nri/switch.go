package nri

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"

	"github.com/minicri/minicri/internal/socket"
)

// Open starts the plugins of the directory, synchronizes them, and listens for others, if NRI is
// enabled. From here on Reconfigure may switch it on and off.
func (p *Plugins) Open(pods Pods, containers Containers) error {
	p.pods, p.containers = pods, containers
	p.switching.Lock()
	p.opened = true
	p.switching.Unlock()
	return p.Reconfigure(p.options)
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
		return fmt.Errorf("the socket of NRI plugins (nri.socket): %w", err)
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
