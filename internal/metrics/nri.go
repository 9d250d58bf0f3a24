package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// nri are the metrics of NRI's plugins; they have no rows while there are none.
type nri struct {
	requests *prometheus.CounterVec
	latency  *prometheus.HistogramVec
	plugins  prometheus.Gauge
	names    *names
}

func newNRI(registry *prometheus.Registry) nri {
	n := nri{
		names: newNames(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "minicri_nri_requests_total",
			Help: "Requests to NRI plugins, by plugin, request and outcome: ok, error, timeout or lost.",
		}, []string{"plugin", "request", "outcome"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "minicri_nri_request_seconds",
			Help:    "How long NRI plugins took for their answers, by plugin and request.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 9),
		}, []string{"plugin", "request"}),
		plugins: prometheus.NewGauge(prometheus.GaugeOpts{Name: "minicri_nri_plugins", Help: "NRI plugins that are connected."}),
	}
	registry.MustRegister(n.requests, n.latency, n.plugins)
	return n
}

// NRIRequest notes a request to an NRI plugin that has ended.
func (m *Metrics) NRIRequest(plugin, request, outcome string) {
	m.nri.requests.WithLabelValues(m.nri.names.label(plugin), request, outcome).Inc()
}

// NRILatency notes how long an NRI plugin took for an answer.
func (m *Metrics) NRILatency(plugin, request string, took time.Duration) {
	m.nri.latency.WithLabelValues(m.nri.names.label(plugin), request).Observe(took.Seconds())
}

// NRIPlugins notes how many NRI plugins are connected.
func (m *Metrics) NRIPlugins(count int) { m.nri.plugins.Set(float64(count)) }
