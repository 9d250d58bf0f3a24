package main

import (
	"log/slog"
	"time"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/metrics"
	"github.com/minicri/minicri/nri"
	"github.com/minicri/minicri/sandbox"
)

// newPlugins are the plugins of NRI, nil if it is off. They are started when pods
// and containers are restored.
func newPlugins(c *config.Config, measured *metrics.Metrics, logger *slog.Logger) (*nri.Plugins, error) {
	if !c.NRI.Enabled {
		return nil, nil
	}
	return nri.New(nriOptions(c, measured, logger))
}

func nriOptions(c *config.Config, measured *metrics.Metrics, logger *slog.Logger) nri.Options {
	n := c.NRI
	return nri.Options{
		Socket: n.Socket, PluginDir: n.PluginDir, ConfigDir: n.ConfigDir,
		Registration: time.Duration(n.Registration), Request: time.Duration(n.Request),
		Version: version, Required: n.Required, Tolerate: n.Tolerate, Reject: n.Reject,
		Metrics: measured, Logger: logger,
	}
}

// podPlugins and containerPlugins are nil where NRI is off, not a nil *nri.Plugins.
func podPlugins(p *nri.Plugins) sandbox.Plugins {
	if p == nil {
		return nil
	}
	return p
}

func containerPlugins(p *nri.Plugins) container.Plugins {
	if p == nil {
		return nil
	}
	return p
}
