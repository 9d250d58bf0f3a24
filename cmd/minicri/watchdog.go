package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/minicri/minicri/internal/inspect"
)

// watchdog tells systemd that the daemon is well, as long as it is
// (WatchdogSec= in systemd.service(5)), until the context ends. Without a
// watchdog it returns at once.
func watchdog(ctx context.Context, node *inspect.Node, logger *slog.Logger) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		logger.Warn("systemd's watchdog is not served", "err", err)
	}
	if interval <= 0 {
		return
	}
	// Half of the interval, as sd_watchdog_enabled(3) recommends: one ping may
	// come late.
	health := &inspect.Health{Probes: node.Probes(), Limit: interval / 2}
	health.Watch(ctx, max(interval/2, time.Millisecond), func() { notify(logger, daemon.SdNotifyWatchdog) }, logger)
}
