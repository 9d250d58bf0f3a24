package main

import (
	"log/slog"
	"time"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/metrics"
	"github.com/minicri/minicri/nri"
)

// nriOptions are those of a configuration; a reload needs no measured and no logger.
func nriOptions(c *config.Config, measured *metrics.Metrics, logger *slog.Logger) nri.Options {
	n := c.NRI
	return nri.Options{
		Source:       nriSource(c),
		Registration: time.Duration(n.Registration), Request: time.Duration(n.Request),
		State: c.State, Version: version, Required: n.Required, Tolerate: n.Tolerate, Reject: n.Reject,
		Metrics: measured, Logger: logger,
	}
}

func nriSource(c *config.Config) nri.Source {
	n := c.NRI
	return nri.Source{Enabled: n.Enabled, Socket: n.Socket, PluginDir: n.PluginDir, ConfigDir: n.ConfigDir}
}
