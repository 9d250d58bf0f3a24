package network

import (
	"context"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

// gcRetry is how soon a collection that found the network busy tries again.
const gcRetry = 5 * time.Second

// collectPeriodically runs CNI GC at the start and then once in a period.
func (n *CNI) collectPeriodically(ctx context.Context) {
	if n.options.Limits.GCPeriod <= 0 {
		return
	}
	for {
		pause := n.options.Limits.GCPeriod
		if !n.gate.collect(ctx, n.collect) {
			pause = gcRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// collect tells the plugins of each network which attachments are valid, so
// that they free what belongs to no one (CNI SPEC, "GC"). It goes through
// libcni, because go-cni has no GC. libcni honours disableGC.
func (n *CNI) collect(ctx context.Context) {
	for name, config := range n.networksInUse() {
		list, err := libcni.NetworkConfFromBytes(config)
		if err != nil {
			n.options.Logger.Warn("CNI GC: configuration not usable", "network", name, "err", err)
			continue
		}
		cni := libcni.NewCNIConfigWithCacheDir(n.options.BinDirs, n.cacheDir(), nil)
		args := &libcni.GCArgs{ValidAttachments: n.valid(name)}
		err = n.plugins.limited(ctx, run{verb: "GC", limit: n.options.Limits.GC},
			func(ctx context.Context) error { return cni.GCNetworkList(ctx, list, args) })
		if err != nil && ctx.Err() == nil {
			n.options.Logger.Warn("CNI GC failed", "network", name, "err", err)
		}
	}
}

// networksInUse are the configurations of the journal and the one of now.
func (n *CNI) networksInUse() map[string][]byte {
	networks := make(map[string][]byte)
	n.mu.Lock()
	for _, a := range n.attachments {
		networks[a.record.Network] = a.record.Config
	}
	n.mu.Unlock()
	if c, err := n.Configuration(); err == nil {
		networks[c.Name] = c.Bytes
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

// cacheDir is not the directory that libcni shares between all runtimes of a
// machine: GCNetworkList runs DEL for every attachment that it finds cached
// for the network and that is not in our list, another runtime's included.
// Ours are in the journal.
func (n *CNI) cacheDir() string { return n.journalDir() + ".gc" }
