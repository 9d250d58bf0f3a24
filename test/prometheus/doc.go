// Package prometheus asks a real Prometheus (Debian's) each query of the
// dashboard hack/grafana.json, over what a real daemon shows: a target of its
// own, make test-prometheus.
package prometheus
