package network

import (
	"context"
	"errors"
	"time"

	gocni "github.com/containerd/go-cni"
)

// status is the last answer to whether pods can be attached; nil error is yes.
type status struct {
	err error
	at  time.Time
}

// notReadyPeriod is how soon the plugins are asked again while they are not
// ready, so that a node becomes ready soon after its network does.
const notReadyPeriod = time.Second

// firstStatus bounds the first question, which the start of the daemon waits
// for; one that hangs is asked again with its full limit.
const firstStatus = time.Second

// Ready tells why no pod can be attached now, or nil. It answers from the
// cache and never waits: STATUS runs beside, and a hanging plugin only makes
// the answer older than it should be, which counts as not ready.
func (n *CNI) Ready() error {
	if _, err := n.Configuration(); err != nil {
		return err
	}
	s := n.status.Load()
	limits := n.options.Limits
	if s.err == nil && time.Since(s.at) > limits.StatusPeriod+2*limits.Status {
		return errors.New("the network plugins have not answered STATUS for " + time.Since(s.at).Round(time.Second).String())
	}
	return s.err
}

func (n *CNI) followStatus(ctx context.Context) {
	for {
		period := n.options.Limits.StatusPeriod
		if n.status.Load().err != nil {
			period = min(period, notReadyPeriod)
		}
		select {
		case <-ctx.Done():
			return
		case <-n.changed:
		case <-time.After(period):
		}
		n.refreshStatus(ctx, n.options.Limits.Status)
	}
}

// refreshStatus asks the plugins of the configuration of now. Plugins before
// CNI 1.1 have no STATUS; that their programs are there is all one can ask.
func (n *CNI) refreshStatus(ctx context.Context, limit time.Duration) {
	configuration, err := n.Configuration()
	if err == nil {
		err = missingPlugins(configuration, n.options.BinDirs)
	}
	if err == nil {
		err = n.plugins.run(ctx, run{verb: "STATUS", limit: limit, config: configuration.Bytes},
			func(_ context.Context, cni gocni.CNI) error { return cni.Status() })
	}
	if last := n.status.Load(); last == nil || (last.err == nil) != (err == nil) {
		n.options.Logger.Info("network readiness changed", "ready", err == nil, "err", err)
	}
	n.status.Store(&status{err: err, at: time.Now()})
}
