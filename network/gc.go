package network

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sync/semaphore"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/network/runner"
)

// gate keeps GC, which takes all of it, apart from other runs, which take 1 each (CNI SPEC, "GC").
func (n *CNI) gate(network string) *semaphore.Weighted {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gates[network] == nil {
		n.gates[network] = semaphore.NewWeighted(math.MaxInt64)
	}
	return n.gates[network]
}

// whileClosed calls f when nothing runs behind the gate, unless the context ends first; new runs wait, up to
// gcTimeout. It polls, because a waiter for all of a semaphore blocks waiters for 1.
func whileClosed(ctx context.Context, gate *semaphore.Weighted, f func()) {
	for !gate.TryAcquire(math.MaxInt64) {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return
		}
	}
	open := sync.OnceFunc(func() { gate.Release(math.MaxInt64) })
	defer open()
	defer time.AfterFunc(gcTimeout, open).Stop()
	f()
}

// collectPeriodically runs GC at the start and then once in a period.
func (n *CNI) collectPeriodically() {
	for n.base.Err() == nil {
		var networks sync.WaitGroup
		if n.limits.Load().GCPeriod > 0 {
			for _, c := range n.networksInUse() {
				networks.Go(func() {
					whileClosed(n.base, n.gate(c.Name), func() { n.collect(c) })
				})
			}
		}
		networks.Wait()
		n.awaitPeriod(nil, func(l Limits) time.Duration { return l.GCPeriod })
	}
}

// collect runs GC of a network (CNI SPEC, "GC"): its plugins free what belongs to no attachment. It calls
// libcni, which honours disableGC, because go-cni has no GC.
func (n *CNI) collect(c *Configuration) {
	if n.isStuck("GC", c.Name) {
		return
	}
	valid := []types.GCAttachment{}
	ids := append(n.attachedTo(c.Name), n.unread...)
	for _, file := range n.journal.Quarantined() { // their pods may run
		ids = append(ids, state.IDOf(file))
	}
	for _, id := range ids {
		valid = append(valid, types.GCAttachment{ContainerID: id, IfName: eth0})
	}
	request := runner.Request{Verb: "GC", Network: c.Name, Limit: n.limits.Load().GC}
	err := n.run(context.Background(), nil, request, func(ctx context.Context, run *runner.Run) error {
		list, err := libcni.NetworkConfFromBytes(c.Bytes)
		if err != nil {
			return err
		}
		// GCNetworkList runs DEL for every cached attachment that is not in our list. libcni's own cache is
		// shared by all runtimes of a machine, so we give it another one. Our attachments are in the journal.
		cni := libcni.NewCNIConfigWithCacheDir(n.options.BinDirs, n.journalDir()+".gc", run)
		return cni.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: valid})
	})
	if err != nil && n.base.Err() == nil {
		n.options.Logger.Warn("CNI GC failed", "network", c.Name, "err", err)
	}
}

// networksInUse returns configurations, of the journal and of now, by network name. The node's own win.
func (n *CNI) networksInUse() map[string]*Configuration {
	networks := make(map[string]*Configuration)
	n.mu.Lock()
	for _, a := range n.attachments {
		networks[a.record.Network] = &Configuration{Name: a.record.Network, Bytes: a.record.Config}
	}
	n.mu.Unlock()
	for _, d := range n.directories() {
		if c, err := d.Configuration(); err == nil {
			networks[c.Name] = c
		}
	}
	return networks
}
