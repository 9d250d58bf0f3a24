package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Value is one value of a metric of a pod or a container.
type Value struct {
	Name, Help          string
	Labels, LabelValues []string
	Counter             bool
	Value               float64
}

// cadvisor are the metrics of pods and containers, under the names of cAdvisor: what the
// kubelet shows at its own /metrics/cadvisor.
type cadvisor func() []Value

// mostScrapes is how many scrapes of pods are answered at once: each measures all of them.
const mostScrapes = 4

// handler answers a scrape, without a value that makes no metric.
func (list cadvisor) handler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(list)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: mostScrapes, ErrorHandling: promhttp.ContinueOnError})
}

// Describe implements prometheus.Collector; what is collected describes itself.
func (cadvisor) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (list cadvisor) Collect(out chan<- prometheus.Metric) {
	for _, v := range list() {
		kind := prometheus.GaugeValue
		if v.Counter {
			kind = prometheus.CounterValue
		}
		desc := prometheus.NewDesc(v.Name, v.Help, v.Labels, nil)
		metric, err := prometheus.NewConstMetric(desc, kind, v.Value, v.LabelValues...)
		if err != nil { // in a goroutine of the registry a panic would end the daemon
			metric = prometheus.NewInvalidMetric(desc, err)
		}
		out <- metric
	}
}
