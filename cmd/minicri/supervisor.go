package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/shim/client"
)

// openSupervisors finds the supervisors of an earlier daemon, and makes them this
// daemon's build of the program.
func openSupervisors(ctx context.Context, c *config.Config, k kernel, logger *slog.Logger) (*client.Set, error) {
	set, err := client.NewSet(client.SetOptions{
		Dir:    filepath.Join(c.State, "shims"),
		Start:  client.StartOptions{Binary: k.shim.Path(), Build: k.shim.Build(), SystemdCgroup: k.systemd},
		Answer: time.Duration(c.Limits.Kill), Logger: logger,
	})
	if err != nil {
		return nil, err
	}
	return set, set.Upgrade(ctx, k.shim.ForOthers())
}

// supervisorGroup returns the rule by which pods share a supervisor, or do not.
func supervisorGroup(inForce *atomic.Pointer[config.Config]) func(handler, id string) string {
	return func(handler, id string) string {
		if inForce.Load().SupervisorOf(handler) == config.SupervisorPod {
			return id
		}
		return client.NodeGroup
	}
}

// startSupervisor has the node's supervisor serve before the first pod asks for
// it. One that does not start now is started by that pod.
func startSupervisor(ctx context.Context, c *config.Config, k kernel, logger *slog.Logger) {
	if c.Supervisor != config.SupervisorNode {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.Limits.Kill))
	defer cancel()
	if _, err := k.supervisors.Ensure(ctx, client.NodeGroup); err != nil {
		logger.Error("the node's supervisor does not start; the first pod retries", "err", err)
	}
}
