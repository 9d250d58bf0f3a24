package metrics

import (
	"context"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// Sources are the owners of what is counted at each scrape.
type Sources struct {
	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	// Streams counts the open sessions, Dropped the events that were lost.
	Streams func() int
	Dropped func() uint64
}

// counts reads its sources at each scrape.
type counts struct{ Sources }

// Describe implements prometheus.Collector; what is collected describes itself.
func (c *counts) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *counts) Collect(out chan<- prometheus.Metric) {
	emit := func(name string, value float64, labels ...string) {
		f, names := family(name)
		kind := prometheus.GaugeValue
		if f.Kind == "counter" {
			kind = prometheus.CounterValue
		}
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(f.Name, f.Help, names, nil), kind, value, labels...)
	}
	c.pods(emit)
	c.containers(emit)
	c.attachments(emit)
	emit(quarantined, float64(len(c.Sandboxes.Quarantined())+len(c.Containers.Quarantined())+len(c.Networks.Quarantined())))
	emit(stuck, float64(len(c.Networks.Stuck())))
	emit(networkReady, c.ready())
	emit(streamsOpen, float64(c.Streams()))
	emit(dropped, float64(c.Dropped()))
}

// emitter puts out one value.
type emitter func(name string, value float64, labels ...string)

func (c *counts) pods(emit emitter) {
	ready, notReady := 0, 0
	for _, sb := range c.Sandboxes.List() {
		if sb.Ready() {
			ready++
		} else {
			notReady++
		}
	}
	emit(sandboxCount, float64(ready), "ready")
	emit(sandboxCount, float64(notReady), "notready")
	emit(sandboxCount, float64(len(c.Sandboxes.Building())), "building")
}

func (c *counts) containers(emit emitter) {
	states := map[string]int{"created": 0, "running": 0, "exited": 0, "unknown": 0}
	for _, one := range c.Containers.List() {
		states[strings.ToLower(strings.TrimPrefix(one.State().String(), "CONTAINER_"))]++
	}
	for state, count := range states {
		emit(containerCount, float64(count), state)
	}
}

func (c *counts) attachments(emit emitter) {
	waiting := c.Networks.Pending()
	oldest := 0.0
	for _, attachment := range waiting {
		if first := attachment.FirstFailure; !first.IsZero() {
			oldest = max(oldest, time.Since(first).Seconds())
		}
	}
	emit(pending, float64(len(waiting)))
	emit(oldestPending, oldest)
	emit(drifted, float64(len(c.Networks.Drifted())))
}

// ready is 1 if pods can be attached. A scrape does not wait for the first
// answer of the plugins.
func (c *counts) ready() float64 {
	now, cancel := context.WithCancel(context.Background())
	cancel()
	if c.Networks.Ready(now) == nil {
		return 1
	}
	return 0
}
