// Package metrics shows the runtime to Prometheus. It owns one registry and one
// listener, off unless an address is configured. What can be counted when it
// is asked for is read from its owner at each scrape; only what passes (calls,
// steps, exits) is kept here. No label has an unbounded set of values.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/minicri/minicri/internal/step"
)

// Metrics are the runtime's metrics. Observe and its kin may be called by many
// goroutines, from the moment that they are made.
type Metrics struct {
	registry                    *prometheus.Registry
	calls, steps, plugins, pull *prometheus.HistogramVec
	exits                       *prometheus.CounterVec
	pulled, oomKills, lost      prometheus.Counter

	// named are the CNI plugins that have a label value of their own.
	named *names

	nri nri
}

// New makes the metrics.
func New() *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), named: newNames()}
	m.calls, m.steps = m.histogram(rpcSeconds, 0.0005, 4, 10), m.histogram(stepSeconds, 0.0005, 2, 18)
	m.plugins, m.pull = m.histogram(pluginSeconds, 0.001, 2, 16), m.histogram(pullSeconds, 0.05, 2, 16)
	m.exits = m.counter(exits)
	m.pulled, m.oomKills, m.lost = m.counter(pulledBytes).WithLabelValues(), m.counter(oomKills).WithLabelValues(), m.counter(lost).WithLabelValues()
	m.nri = newNRI(m.registry)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *Metrics) histogram(name string, first, factor float64, count int) *prometheus.HistogramVec {
	f, labels := family(name)
	made := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: f.Name, Help: f.Help, Buckets: prometheus.ExponentialBuckets(first, factor, count),
	}, labels)
	m.registry.MustRegister(made)
	return made
}

func (m *Metrics) counter(name string) *prometheus.CounterVec {
	f, labels := family(name)
	made := prometheus.NewCounterVec(prometheus.CounterOpts{Name: f.Name, Help: f.Help}, labels)
	m.registry.MustRegister(made)
	return made
}

// Observe notes how long a step took, and whether it failed.
func (m *Metrics) Observe(name step.Name, took time.Duration, err error) {
	m.steps.WithLabelValues(string(name), outcomeOf(err == nil)).Observe(took.Seconds())
}

// ObserveCall notes a call of a method, "/service/Method", that has ended with a
// code.
func (m *Metrics) ObserveCall(method, code string, took time.Duration) {
	m.calls.WithLabelValues(path.Base(method), code).Observe(took.Seconds())
}

// ObservePlugin notes a run of a CNI plugin.
func (m *Metrics) ObservePlugin(plugin, verb string, took time.Duration, ok bool) {
	if !slices.Contains([]string{"ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION"}, verb) {
		verb = other
	}
	m.plugins.WithLabelValues(m.named.label(plugin), verb, outcomeOf(ok)).Observe(took.Seconds())
}

// other stands for what has no label value of its own.
const other = "other"

// mostPlugins bounds the label values that configurations and plugins choose.
const mostPlugins = 64

// names are the label values of a kind that have rows. Plugins of NRI name
// themselves: one that comes back under another name each time must not cost
// memory forever.
type names struct {
	mu    sync.Mutex
	known map[string]bool
}

func newNames() *names { return &names{known: make(map[string]bool)} }

// label is the name, or other.
func (n *names) label(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.known[name] && len(n.known) >= mostPlugins {
		return other
	}
	n.known[name] = true
	return name
}

// ObserveExit notes that a container has ended, with the reason of the CRI.
func (m *Metrics) ObserveExit(reason string) {
	if !slices.Contains([]string{"Completed", "Error", "OOMKilled", "StartError", "Unknown"}, reason) {
		reason = other
	}
	m.exits.WithLabelValues(reason).Inc()
	if reason == "OOMKilled" {
		m.oomKills.Inc()
	}
}

// ObserveLost notes that a supervisor has died.
func (m *Metrics) ObserveLost() { m.lost.Inc() }

// ObservePull notes a pull that has ended.
func (m *Metrics) ObservePull(took time.Duration, bytes int64, err error) {
	m.pull.WithLabelValues(outcomeOf(err == nil)).Observe(took.Seconds())
	m.pulled.Add(float64(bytes))
}

func outcomeOf(ok bool) string {
	if !ok {
		return "error"
	}
	return "ok"
}

// Watch adds what is counted at each scrape.
func (m *Metrics) Watch(sources Sources) { m.registry.MustRegister(&counts{sources}) }

// Handler answers a scrape.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Serve answers /metrics on a TCP address until the context ends.
func (m *Metrics) Serve(ctx context.Context, address string, logger *slog.Logger) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen for metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", m.Handler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	logger.Info("serving metrics", "address", listener.Addr())
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
