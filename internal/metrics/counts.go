package metrics

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// counts reads the owners of things at each scrape.
type counts struct {
	sandboxes  *sandbox.Store
	containers *container.Store
	networks   *network.CNI
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("minicri_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector; what is collected describes itself.
func (c *counts) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *counts) Collect(out chan<- prometheus.Metric) {
	ready, notReady := 0, 0
	for _, sb := range c.sandboxes.List() {
		if sb.Ready() {
			ready++
		} else {
			notReady++
		}
	}
	gauge := func(desc *prometheus.Desc, value int, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(value), labels...)
	}
	state := describe("sandboxes", "Pod sandboxes by state.", "state")
	gauge(state, ready, "ready")
	gauge(state, notReady, "notready")
	gauge(state, len(c.sandboxes.Building()), "building")
	gauge(describe("attachments_pending", "Attachments whose CNI DEL has failed and is being repeated."), len(c.networks.Pending()))
	gauge(describe("attachments_drifted", "Attachments that CNI CHECK found changed."), len(c.networks.Drifted()))
	gauge(describe("records_quarantined", "Records of pods, containers and attachments that cannot be read."),
		len(c.sandboxes.Quarantined())+len(c.containers.Quarantined())+len(c.networks.Quarantined()))
	gauge(describe("plugin_runs_stuck", "Runs of CNI plugins whose processes were killed and did not end."), len(c.networks.Stuck()))
	networkReady := 0
	// A scrape does not wait for the first answer of the plugins.
	now, cancel := context.WithCancel(context.Background())
	cancel()
	if c.networks.Ready(now) == nil {
		networkReady = 1
	}
	gauge(describe("network_ready", "Whether pods can be attached."), networkReady)
}
