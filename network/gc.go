package network

import (
	"context"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// collectPeriodically runs CNI GC at the start and then once in a period.
func (n *CNI) collectPeriodically(ctx context.Context) {
	for ctx.Err() == nil {
		var networks sync.WaitGroup
		if n.limits.Load().GCPeriod > 0 {
			for _, configuration := range n.networksInUse() {
				networks.Go(func() {
					n.gate(configuration.Name).collect(ctx, func() { n.collect(ctx, configuration) })
				})
			}
		}
		networks.Wait()
		n.awaitPeriod(ctx, nil, gcPeriod)
	}
}

func gcPeriod(l Limits) time.Duration { return l.GCPeriod }

// collect gives the plugins of a network the list of valid attachments, so that
// they free what belongs to none of them (CNI SPEC, "GC"). libcni honours
// disableGC.
func (n *CNI) collect(ctx context.Context, c *Configuration) {
	if n.plugins.isStuck("GC", c.Name) {
		return
	}
	o := n.plugins.gc(context.WithoutCancel(ctx), c, n.valid(c.Name))
	if o.err != nil && ctx.Err() == nil {
		n.options.Logger.Warn("CNI GC failed", "network", c.Name, "err", o.err)
	}
}

// networksInUse are the configurations of the journal and those of now, by the
// name of the network; the node's own counts where two have one name.
func (n *CNI) networksInUse() map[string]*Configuration {
	networks := make(map[string]*Configuration)
	n.mu.Lock()
	for _, a := range n.attachments {
		networks[a.record.Network] = &Configuration{Name: a.record.Network, Bytes: a.record.Config, Plugins: pluginTypes(a.record.Config)}
	}
	n.mu.Unlock()
	for _, d := range n.directories() {
		if c, err := d.Configuration(); err == nil {
			networks[c.Name] = c
		}
	}
	return networks
}

func (n *CNI) valid(network string) []types.GCAttachment {
	n.mu.Lock()
	defer n.mu.Unlock()
	valid := []types.GCAttachment{}
	for id, a := range n.attachments {
		if a.record.Network == network {
			valid = append(valid, types.GCAttachment{ContainerID: id, IfName: eth0})
		}
	}
	return valid
}

// gcCacheDir is not the directory that libcni shares between all runtimes of a
// machine: GCNetworkList runs DEL for every attachment that it finds cached
// for the network and that is not in our list, another runtime's included.
// Ours are in the journal.
func (n *CNI) gcCacheDir() string { return n.journalDir() + ".gc" }
