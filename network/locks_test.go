package network

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// A directory whose disk hangs, and a program that changes rules and hangs, delay no call that has ended.
//
// attack: denial of service: the disk of the CNI configuration hangs, or nft does
// held: a call ends with its deadline; the last configuration, problems and rules are still reported
func TestHangingDiskAndRules(t *testing.T) {
	owner := &CNI{options: Options{Logger: slog.New(slog.DiscardHandler)}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d := &Directory{owner: owner, path: t.TempDir(), ctx: ctx, asked: make(chan struct{})}
	d.current.Store(&snapshot{})
	d.reading.Lock() // the polling goroutine reads
	_, err := d.Configuration()
	harness.Want(t, errors.Is(err, ErrNoConfiguration), "the configuration: %v", err)
	_, err = d.latest(ctx)
	harness.Want(t, errors.Is(err, ErrNoConfiguration), "a pod's look: %v", err)
	harness.Want(t, errors.Is(d.Ready(ctx), ErrNoConfiguration), "Status")
	d.current.Store(&snapshot{configuration: &Configuration{Name: "net"}})
	last, err := d.latest(ctx)
	harness.Want(t, err == nil && last.Name == "net", "the last configuration: %v, %v", last, err)
	d.reading.Unlock()

	owner.forward.problem = "chain FORWARD drops"
	owner.forward.changing.Lock() // nft runs
	harness.Same(t, "what blocks", owner.forward.blocked(), "chain FORWARD drops")
	harness.Same(t, "subnets", len(owner.forward.subnets()), 0)
	owner.forward.changing.Unlock()
}
