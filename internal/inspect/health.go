package inspect

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// Health asks whether the daemon can still do its work: whether every lock that
// all calls need can be acquired, so that nothing that waits for one of them
// waits forever. A pod that hangs, a plugin or a disk does not count: they hold
// up no other.
type Health struct {
	// Probes are asked one after the other; each takes a lock for a moment.
	Probes []Probe
	// Limit is how long all of them may take.
	Limit time.Duration

	busy atomic.Bool
}

// Probe takes a lock for a moment, and returns when it has had it.
type Probe struct {
	Name string
	Take func()
}

// Probes of a node: the lists of pods, containers and attachments, and the
// subscriptions of events.
func (n *Node) Probes() []Probe {
	return []Probe{
		{"pods", func() { n.Sandboxes.Building() }},
		{"containers", func() { n.Containers.List() }},
		{"attachments", func() { n.Networks.Pending() }},
	}
}

// Check reports which probe did not return within the limit, "" if all did. A
// probe that hangs is left hanging, and the check fails until it returns.
func (h *Health) Check(ctx context.Context) (stuck string) {
	if !h.busy.CompareAndSwap(false, true) {
		return "an earlier probe"
	}
	var at atomic.Pointer[string]
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, probe := range h.Probes {
			at.Store(&probe.Name)
			probe.Take()
		}
		h.busy.Store(false)
	}()
	limit := time.NewTimer(h.Limit)
	defer limit.Stop()
	select {
	case <-done:
		return ""
	case <-ctx.Done():
		return ""
	case <-limit.C:
		return *at.Load()
	}
}

// Watch checks once in a period and calls ping as long as all is well, until the
// context ends. The first check that fails is logged with the stacks of all
// goroutines, which a restart would take along.
func (h *Health) Watch(ctx context.Context, period time.Duration, ping func(), logger *slog.Logger) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	said := false
	for {
		stuck := h.Check(ctx)
		switch {
		case stuck == "":
			said = false
			ping()
		case !said:
			said = true
			logger.Error("the daemon is stuck: systemd's watchdog will restart it, and the pods keep running", "probe", stuck, "goroutines", string(goroutines()))
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
