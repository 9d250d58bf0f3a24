package metrics

import "github.com/prometheus/client_golang/prometheus"

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

// Describe implements prometheus.Collector; what is collected describes itself.
func (cadvisor) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (list cadvisor) Collect(out chan<- prometheus.Metric) {
	for _, v := range list() {
		kind := prometheus.GaugeValue
		if v.Counter {
			kind = prometheus.CounterValue
		}
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(v.Name, v.Help, v.Labels, nil), kind, v.Value, v.LabelValues...)
	}
}
