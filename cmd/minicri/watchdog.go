package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/minicri/minicri/internal/inspect"
)

// watchdog pings systemd as long as the daemon is well (WatchdogSec= in
// systemd.service(5)), until the context ends. Without a watchdog it returns at once.
func watchdog(ctx context.Context, node *inspect.Node, logger *slog.Logger) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		logger.Warn("systemd's watchdog is not served", "err", err)
	}
	if interval <= 0 {
		return
	}
	// Every third of the interval, so that one ping may come late, and that after two
	// of them the log says what is stuck: systemd ends the daemon after the third.
	third := max(interval/3, time.Millisecond)
	health := &inspect.Health{Probes: node.Probes(), Limit: third}
	health.Watch(ctx, third, func() { notify(logger, daemon.SdNotifyWatchdog) }, logger)
}
