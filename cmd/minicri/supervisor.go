package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/shim/client"
)

// openSupervisors finds the supervisors of an earlier daemon.
func openSupervisors(c *config.Config, k kernel, logger *slog.Logger) (*client.Set, error) {
	return client.NewSet(client.SetOptions{
		Dir:    filepath.Join(c.State, "shims"),
		Start:  client.StartOptions{Binary: k.shim.Path(), Build: k.shim.Build(), Version: version, ForOthers: k.shim.ForOthers(), SystemdCgroup: k.systemd},
		Answer: time.Duration(c.Limits.Kill), Logger: logger,
	})
}

// startSupervisor has this build's supervisor serve before the first pod asks for
// it. One that does not start now is started by that pod.
func startSupervisor(ctx context.Context, c *config.Config, k kernel, logger *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.Limits.Kill))
	defer cancel()
	if _, err := k.supervisors.Ensure(ctx, k.supervisors.Own()); err != nil {
		logger.Error("the supervisor does not start; the first pod retries", "err", err)
	}
}
