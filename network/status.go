package network

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// status is the last answer to whether pods can be attached; nil error is yes.
type status struct {
	err error
	at  time.Time
	// slow is set when the plugins have not answered in time since then.
	slow bool
}

// notReadyPeriod is how soon the plugins are asked again while they are not
// ready or did not answer, so that a node becomes ready soon after its network
// does.
const notReadyPeriod = time.Second

// Ready returns why no pod can be attached now, or nil. It answers from memory
// and waits for the first answer after the start only, which takes as long as
// STATUS may. A plugin that hangs makes the answer older than it should be,
// and from the second time on counts as not ready.
func (d *Directory) Ready(ctx context.Context) error {
	if _, err := d.Configuration(); err != nil {
		return err
	}
	select {
	case <-d.asked:
	case <-d.left.Done():
		return fmt.Errorf("%s is no configuration directory of the node or of a runtime handler any more", d.path)
	case <-ctx.Done():
		if d.status.Load() != nil {
			break
		}
		return fmt.Errorf("the network plugins have not answered STATUS yet: %w", context.Cause(ctx))
	}
	s := d.status.Load()
	limits := d.owner.limits.Load()
	// A period that was longer until now makes no answer old.
	if s.err == nil && min(time.Since(s.at), time.Since(limits.since)) > 2*limits.StatusPeriod+3*limits.Status {
		return errors.New("the network plugins have not answered STATUS for " + time.Since(s.at).Round(time.Second).String())
	}
	return s.err
}

func (d *Directory) followStatus(ctx context.Context) {
	for {
		d.refreshStatus(ctx)
		s := d.status.Load()
		unsure := s != nil && (s.err != nil || s.slow)
		d.owner.awaitPeriod(ctx, d.changed, func(l Limits) time.Duration {
			if unsure {
				return min(l.StatusPeriod, notReadyPeriod)
			}
			return l.StatusPeriod
		})
		if ctx.Err() != nil {
			return
		}
	}
}

// refreshStatus asks the plugins of the configuration of now. Plugins before
// CNI 1.1 have no STATUS; that their programs are there is all one can ask.
func (d *Directory) refreshStatus(ctx context.Context) {
	configuration, err := d.Configuration()
	if err == nil {
		err = missingPlugins(configuration, d.owner.options.BinDirs)
	}
	slow := false
	if err == nil {
		err, slow = d.owner.askStatus(ctx, configuration)
	}
	if ctx.Err() != nil || d.owner.base.Err() != nil {
		return // the daemon ends, which says nothing of the network
	}
	last := d.status.Load()
	if slow && last != nil && last.err == nil && !last.slow {
		// One slow answer is a sign of a busy machine rather than of the network.
		d.owner.options.Logger.Warn("the network plugins are slow to answer STATUS: they are asked again", "err", err)
		d.status.Store(&status{at: last.at, slow: true})
		return
	}
	d.status.Store(&status{err: err, at: time.Now()})
	if last == nil {
		close(d.asked)
	}
	if last == nil || (last.err == nil) != (err == nil) {
		d.owner.options.Logger.Info("network readiness changed", "dir", d.path, "ready", err == nil, "err", err)
	}
	if err == nil && last != nil && last.err != nil {
		d.owner.retries.all()
	}
}

// askStatus runs STATUS; slow reports whether it was not answered in time.
func (n *CNI) askStatus(ctx context.Context, c *Configuration) (err error, slow bool) {
	if n.plugins.isStuck("STATUS", c.Name) {
		return fmt.Errorf("CNI STATUS: %w", errStuck), false
	}
	o := n.plugins.status(context.WithoutCancel(ctx), c)
	return o.err, o.late
}
