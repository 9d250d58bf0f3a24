// Package metrics shows the runtime to Prometheus. It owns one registry and one
// listener, off unless an address is configured. What can be counted when it
// is asked for is read from its owner at each scrape; only what passes (the
// durations of steps) is kept here.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// Metrics are the runtime's metrics.
type Metrics struct {
	registry *prometheus.Registry
	steps    *prometheus.HistogramVec
	pulls    *prometheus.HistogramVec
	pulled   prometheus.Counter
	nri      nri
}

// New makes the metrics; Observe may be called at once.
func New() *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "minicri_sandbox_step_seconds",
			Help:    "How long each step of a pod's or container's life took, by step and outcome.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 18),
		}, []string{"step", "outcome"}),
		pulls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "minicri_image_pull_seconds",
			Help:    "How long each pull of an image took, by outcome. Pulls that were merged count once.",
			Buckets: prometheus.ExponentialBuckets(0.05, 2, 16),
		}, []string{"outcome"}),
		pulled: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "minicri_image_pulled_bytes_total",
			Help: "Bytes of images that registries sent, of failed pulls too.",
		}),
	}
	m.nri = newNRI(m.registry)
	m.registry.MustRegister(m.pulls, m.pulled, m.steps, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Observe notes how long a step took, and whether it failed.
func (m *Metrics) Observe(name step.Name, took time.Duration, err error) {
	m.steps.WithLabelValues(string(name), outcomeOf(err)).Observe(took.Seconds())
}

// ObservePull notes a pull that has ended.
func (m *Metrics) ObservePull(took time.Duration, bytes int64, err error) {
	m.pulls.WithLabelValues(outcomeOf(err)).Observe(took.Seconds())
	m.pulled.Add(float64(bytes))
}

func outcomeOf(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}

// Watch adds what is counted at each scrape.
func (m *Metrics) Watch(sandboxes *sandbox.Store, containers *container.Store, networks *network.CNI) {
	m.registry.MustRegister(&counts{sandboxes: sandboxes, containers: containers, networks: networks})
}

// Serve answers /metrics on a TCP address until the context ends.
func (m *Metrics) Serve(ctx context.Context, address string, logger *slog.Logger) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen for metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	logger.Info("serving metrics", "address", listener.Addr())
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
