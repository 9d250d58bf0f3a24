// Package metrics shows the runtime to Prometheus. It owns one registry and one listener, off unless an
// address is configured. It counts objects at each scrape, and keeps only transient values:
// calls, steps, exits. No label has an unbounded set of values.
package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// Metrics are the runtime's metrics. Observe and its kin may be called concurrently.
type Metrics struct {
	registry *prometheus.Registry
	sources  Sources

	calls, steps, plugins, pull, nriSeconds    *prometheus.HistogramVec
	exits, pulled, oomKills, lost, nriRequests *prometheus.CounterVec
	pullFailures                               *prometheus.CounterVec
	reloaded, reloadedAt, nriPlugins           *prometheus.GaugeVec
	cniNames, nriNames                         names
}

// New makes the metrics.
func New() *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.calls, m.steps = m.histogram("minicri_rpc_seconds", 0.0005, 4, 10), m.histogram("minicri_sandbox_step_seconds", 0.001, 4, 8)
	m.plugins, m.pull = m.histogram("minicri_cni_plugin_seconds", 0.004, 4, 8), m.histogram("minicri_image_pull_seconds", 0.05, 2, 16)
	m.nriSeconds, m.nriRequests = m.histogram("minicri_nri_request_seconds", 0.0005, 4, 9), m.counter("minicri_nri_requests_total")
	m.exits, m.pulled = m.counter("minicri_container_exits_total"), m.counter("minicri_image_pulled_bytes_total")
	m.oomKills, m.lost = m.counter("minicri_container_oom_kills_total"), m.counter("minicri_supervisor_restarts_total")
	m.pullFailures = m.counter("minicri_image_pull_failures_total")
	for _, one := range append(slices.Collect(reasons()), other) {
		m.pullFailures.WithLabelValues(one)
	}
	for _, one := range []*prometheus.CounterVec{m.pulled, m.oomKills, m.lost} {
		one.WithLabelValues() // shown as 0 from the start
	}
	m.reloaded, m.reloadedAt = m.gauge("minicri_config_last_reload_successful"), m.gauge("minicri_config_last_reload_success_timestamp_seconds")
	m.nriPlugins = m.gauge("minicri_nri_plugins")
	m.NRIPlugins(0)
	m.ObserveReload(true) // the start
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *Metrics) histogram(name string, first, factor float64, count int) *prometheus.HistogramVec {
	f, labels := family(name)
	buckets := prometheus.ExponentialBuckets(first, factor, count)
	return register(m, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: f.Help, Buckets: buckets}, labels))
}

func (m *Metrics) counter(name string) *prometheus.CounterVec {
	f, labels := family(name)
	return register(m, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: f.Help}, labels))
}

func (m *Metrics) gauge(name string) *prometheus.GaugeVec {
	f, labels := family(name)
	return register(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: f.Help}, labels))
}

func register[C prometheus.Collector](m *Metrics, made C) C {
	m.registry.MustRegister(made)
	return made
}

// ObserveReload notes whether a configuration was put into force.
func (m *Metrics) ObserveReload(ok bool) {
	successful := 0.0
	if ok {
		successful = 1
		m.reloadedAt.WithLabelValues().SetToCurrentTime()
	}
	m.reloaded.WithLabelValues().Set(successful)
}

// Observe notes a step that has ended.
func (m *Metrics) Observe(name step.Name, took time.Duration, err error) {
	m.steps.WithLabelValues(string(name), outcomes[err == nil]).Observe(took.Seconds())
}

// ObserveCall notes a call of a method, "/service/Method", that has ended.
func (m *Metrics) ObserveCall(method, code string, took time.Duration) {
	m.calls.WithLabelValues(path.Base(method), code).Observe(took.Seconds())
}

// ObservePlugin notes a run of a CNI plugin.
func (m *Metrics) ObservePlugin(plugin, verb string, took time.Duration, ok bool) {
	verb = known(verb, "ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION")
	m.plugins.WithLabelValues(m.cniNames.label(plugin), verb, outcomes[ok]).Observe(took.Seconds())
}

const other = "other"

func known(value string, values ...string) string {
	if !slices.Contains(values, value) {
		return other
	}
	return value
}

// maxPlugins bounds the label values that configurations and plugins choose.
const maxPlugins = 64

// names are label values in use. NRI plugins name themselves: new names must not take memory forever.
type names struct {
	mu    sync.Mutex
	known []string
}

func (n *names) label(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Contains(n.known, name) {
		if len(n.known) >= maxPlugins {
			return other
		}
		n.known = append(n.known, name)
	}
	return name
}

// ObserveExit notes that a container has exited, with the CRI's reason.
func (m *Metrics) ObserveExit(reason string) {
	m.exits.WithLabelValues(known(reason, "Completed", "Error", "OOMKilled", "StartError", "Unknown")).Inc()
	if reason == "OOMKilled" {
		m.oomKills.WithLabelValues().Inc()
	}
}

// ObserveLost notes that a supervisor has died.
func (m *Metrics) ObserveLost() { m.lost.WithLabelValues().Inc() }

// ObservePull notes a pull that has ended.
func (m *Metrics) ObservePull(took time.Duration, bytes int64, err error) {
	m.pull.WithLabelValues(outcomes[err == nil]).Observe(took.Seconds())
	m.pulled.WithLabelValues().Add(float64(bytes))
	if err != nil {
		m.pullFailures.WithLabelValues(reasonOf(err)).Inc()
	}
}

// pullReasons are the reasons of failed pulls. The first that fits an error counts.
var pullReasons = []struct {
	reason string
	is     func(error) bool
}{
	{"canceled", func(err error) bool { return errors.Is(err, context.Canceled) }},
	{"no_space", func(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }},
	{"certificate", isCertificate},
	{"verification", func(err error) bool { return errors.Is(err, image.ErrVerification) }},
	{"unavailable", func(err error) bool { return errors.Is(err, image.ErrRegistryUnavailable) }},
	{"content", errdefs.IsDataLoss},
	{"unauthorized", errdefs.IsUnauthorized},
	{"forbidden", errdefs.IsPermissionDenied},
	{"rate_limited", errdefs.IsResourceExhausted},
	{"not_found", errdefs.IsNotFound},
	{"invalid", errdefs.IsInvalidArgument},
}

func isCertificate(err error) bool {
	_, is := errors.AsType[*tls.CertificateVerificationError](err)
	return is
}

func reasons() iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, one := range pullReasons {
			if !yield(one.reason) {
				return
			}
		}
	}
}

func reasonOf(err error) string {
	for _, one := range pullReasons {
		if one.is(err) {
			return one.reason
		}
	}
	return other
}

// NRIRequest notes a request to an NRI plugin that has ended.
func (m *Metrics) NRIRequest(plugin, request, outcome string) {
	m.nriRequests.WithLabelValues(m.nriNames.label(plugin), request, outcome).Inc()
}

// NRILatency notes how long an NRI plugin took for an answer.
func (m *Metrics) NRILatency(plugin, request string, took time.Duration) {
	m.nriSeconds.WithLabelValues(m.nriNames.label(plugin), request).Observe(took.Seconds())
}

// NRIPlugins notes how many NRI plugins are connected.
func (m *Metrics) NRIPlugins(count int) { m.nriPlugins.WithLabelValues().Set(float64(count)) }

var outcomes = map[bool]string{true: "ok", false: "error"}

// Watch adds the values that are counted at each scrape.
func (m *Metrics) Watch(sources Sources) {
	m.sources = sources
	m.registry.MustRegister(&counts{sources})
}

// Handler answers a scrape.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

const headerLimit = 10 * time.Second // limits the headers of a scrape

const landing = `<!doctype html><title>minicri</title><h1>minicri %s</h1>
<ul><li><a href="/metrics">metrics of the runtime</a>
<li><a href="/metrics/cadvisor">metrics of pods and containers</a>
<li><a href="/healthz">health of the daemon</a></ul>
`

// Serve answers /metrics, /metrics/cadvisor, /healthz and a page with these links on a TCP address, by TLS unless that
// is nil.
func (m *Metrics) Serve(ctx context.Context, address string, secure *tls.Config, logger *slog.Logger) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen for metrics: %w", err)
	}
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	server := &http.Server{Handler: m.routes(), ReadHeaderTimeout: headerLimit}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	logger.Info("serving metrics", "address", listener.Addr().String())
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}

func (m *Metrics) routes() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", m.Handler())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, landing, m.sources.Version) })
	mux.Handle("/metrics/cadvisor", cadvisor{m.sources.Descriptors, m.sources.Cadvisor}.handler())
	return mux
}

// Family is a family of metrics, as docs/metrics.md describes it.
type Family struct {
	Name   string // begins with "minicri_"
	Kind   string // "counter", "gauge" or "histogram"
	Help   string
	Labels []Label
}

// Label is a label and its values in words.
type Label struct{ Name, Values string }

// Families are all that this package makes, in the order of the page.
func Families() []Family {
	outcome, plugin, request := Label{"outcome", "ok, error"}, Label{"plugin", "the NRI plugins"}, Label{"request", "the requests of NRI"}
	return []Family{
		{"minicri_build_info", "gauge", "1, with the version of the daemon.", []Label{{"version", "the version"}, {"goversion", "the version of Go"}}},
		{"minicri_rpc_seconds", "histogram", "Duration of CRI calls in seconds.", []Label{{"method", "the methods of the CRI: RunPodSandbox"}, {"code", "the gRPC codes: OK"}}},
		{"minicri_sandbox_step_seconds", "histogram", "Duration of the steps of pods and containers in seconds.", []Label{{"step", "the steps of pods and containers: pod/cni add"}, outcome}},
		{"minicri_cni_plugin_seconds", "histogram", "Duration of CNI plugin runs in seconds, including the IPAM plugin.", []Label{{"plugin", "the first 64 plugins, and other"}, {"verb", "ADD, DEL, CHECK, STATUS, GC, VERSION, other"}, outcome}},
		{"minicri_image_pull_seconds", "histogram", "Duration of image pulls in seconds. Merged pulls count once.", []Label{outcome}},
		{
			"minicri_image_pull_failures_total", "counter", "Failed image pulls.",
			[]Label{{"reason", strings.Join(append(slices.Collect(reasons()), other), ", ")}},
		},
		{"minicri_image_pulls", "gauge", "Image pulls under way.", nil},
		{"minicri_supervisors_memory_bytes", "gauge", "Memory (Pss) of all supervisors.", nil},
		{"minicri_image_pulled_bytes_total", "counter", "Bytes received from registries, including failed pulls.", nil},
		{"minicri_container_exits_total", "counter", "Containers that have ended.", []Label{{"reason", "Completed, Error, OOMKilled, StartError, Unknown, other"}}},
		{"minicri_container_oom_kills_total", "counter", "Containers killed because the container or its pod reached its memory limit.", nil},
		{"minicri_supervisor_restarts_total", "counter", "Supervisors that died and were replaced.", nil},
		{"minicri_events_dropped_total", "counter", "Events dropped for slow consumers; each one ended a subscription.", nil},
		{"minicri_nri_requests_total", "counter", "Requests to NRI plugins; no series without plugins.", []Label{plugin, request, {"outcome", "ok, error, timeout, lost"}}},
		{"minicri_nri_request_seconds", "histogram", "Duration of NRI plugin requests in seconds.", []Label{plugin, request}},
		{"minicri_nri_plugins", "gauge", "Connected NRI plugins.", nil},
		{"minicri_sandboxes", "gauge", "Pod sandboxes.", []Label{{"state", "ready, notready, building"}}},
		{"minicri_containers", "gauge", "Containers.", []Label{{"state", "created, running, exited, unknown"}}},
		{"minicri_attachments_pending", "gauge", "Attachments with a failed CNI DEL that is repeated.", nil},
		{"minicri_attachments_pending_oldest_seconds", "gauge", "Age of the oldest of these attachments since its first failed DEL; 0 without any.", nil},
		{
			"minicri_cni_failures_total", "counter", "Failed runs of the plugins of a network.",
			[]Label{{"network", "the networks of the node, and other"}, {"verb", "ADD, DEL, CHECK, STATUS, GC"}},
		},
		{"minicri_attachments_drifted", "gauge", "Attachments that failed CNI CHECK.", nil},
		{"minicri_records_quarantined", "gauge", "Records of pods, containers and attachments that cannot be read.", nil},
		{"minicri_plugin_runs_stuck", "gauge", "CNI plugin runs with processes that did not end after SIGKILL.", nil},
		{"minicri_network_ready", "gauge", "1 if pods can be attached to the network, otherwise 0.", nil},
		{"minicri_streams_open", "gauge", "Sessions of exec, attach and port-forward.", nil},
		{"minicri_config_last_reload_successful", "gauge", "1 if the last read of the configuration succeeded, otherwise 0.", nil},
		{"minicri_config_last_reload_success_timestamp_seconds", "gauge", "Time of the last successful start or reload.", nil},
		{"minicri_images", "gauge", "Images on the node.", nil},
		{"minicri_disk_size_bytes", "gauge", "Size of the file system with images and writable layers.", nil},
		{"minicri_disk_free_bytes", "gauge", "Free space of this file system.", nil},
		{"minicri_disk_free_inodes", "gauge", "Free inodes of this file system; no series on file systems without inode counts, such as btrfs.", nil},
	}
}

// family panics for a name that Families does not have.
func family(name string) (f Family, labels []string) {
	all := Families()
	f = all[slices.IndexFunc(all, func(f Family) bool { return f.Name == name })]
	for _, label := range f.Labels {
		labels = append(labels, label.Name)
	}
	return f, labels
}

// Sources own the values that are counted at each scrape.
type Sources struct {
	Version    string
	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	Images     *image.Store
	// Cadvisor measures pods and containers; Descriptors describe the metrics.
	Cadvisor    func() []*runtimeapi.PodSandboxMetrics
	Descriptors []*runtimeapi.MetricDescriptor
	Root        string        // the durable directory
	Streams     func() int    // open sessions
	Dropped     func() uint64 // lost events
	Supervisors func() uint64 // memory in bytes
}

type counts struct{ Sources }

var kinds = map[bool]prometheus.ValueType{true: prometheus.CounterValue, false: prometheus.GaugeValue}

func (c *counts) Describe(chan<- *prometheus.Desc) {}

func (c *counts) Collect(out chan<- prometheus.Metric) {
	emit := func(name string, value float64, labels ...string) {
		f, names := family(name)
		kind := kinds[f.Kind == "counter"]
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(f.Name, f.Help, names, nil), kind, value, labels...)
	}
	count := func(name string, count int, labels ...string) { emit(name, float64(count), labels...) }
	listed := c.Sandboxes.List()
	ready := slices.DeleteFunc(slices.Clone(listed), func(sb *sandbox.Sandbox) bool { return !sb.Ready() })
	count("minicri_sandboxes", len(ready), "ready")
	count("minicri_sandboxes", len(listed)-len(ready), "notready")
	count("minicri_sandboxes", len(c.Sandboxes.Building()), "building")
	states := map[string]int{"created": 0, "running": 0, "exited": 0, "unknown": 0}
	for _, one := range c.Containers.List() {
		states[strings.ToLower(strings.TrimPrefix(one.State().String(), "CONTAINER_"))]++
	}
	for state, of := range states {
		count("minicri_containers", of, state)
	}
	pending, oldest := c.Networks.Pending(), 0.0
	for _, attachment := range pending {
		if first := attachment.FirstFailure; !first.IsZero() {
			oldest = max(oldest, time.Since(first).Seconds())
		}
	}
	count("minicri_attachments_pending", len(pending))
	emit("minicri_attachments_pending_oldest_seconds", oldest)
	for of, failures := range c.Networks.Failures() {
		count("minicri_cni_failures_total", failures, of.Network, of.Verb)
	}
	count("minicri_attachments_drifted", len(c.Networks.Drifted()))
	count("minicri_records_quarantined", len(c.Sandboxes.Quarantined())+len(c.Containers.Quarantined())+len(c.Networks.Quarantined()))
	count("minicri_plugin_runs_stuck", len(c.Networks.Stuck()))
	now, cancel := context.WithCancel(context.Background())
	cancel() // a scrape does not wait for the first answer of the plugins
	count("minicri_network_ready", map[bool]int{true: 1}[c.Networks.Ready(now) == nil])
	count("minicri_streams_open", c.Streams())
	emit("minicri_events_dropped_total", float64(c.Dropped()))
	count("minicri_images", len(c.Images.List()))
	count("minicri_image_pulls", len(c.Images.PullsUnderWay()))
	emit("minicri_supervisors_memory_bytes", float64(c.Supervisors()))
	disk(c.Root, emit)
	count("minicri_build_info", 1, c.Version, runtime.Version())
}

func disk(root string, emit func(name string, value float64, labels ...string)) {
	var disk unix.Statfs_t
	if unix.Statfs(root, &disk) != nil {
		return
	}
	emit("minicri_disk_size_bytes", float64(disk.Blocks)*float64(disk.Bsize))
	emit("minicri_disk_free_bytes", float64(disk.Bavail)*float64(disk.Bsize))
	if disk.Files > 0 { // btrfs counts none
		emit("minicri_disk_free_inodes", float64(disk.Ffree))
	}
}

// cadvisor has the metrics of pods and containers under the names of cAdvisor.
type cadvisor struct {
	described []*runtimeapi.MetricDescriptor
	measure   func() []*runtimeapi.PodSandboxMetrics
}

// maxScrapes limits how many scrapes measure all pods at once.
const maxScrapes = 4

func (c cadvisor) handler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(c)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, ErrorHandling: promhttp.ContinueOnError})
}

func (cadvisor) Describe(chan<- *prometheus.Desc) {}

func (c cadvisor) Collect(out chan<- prometheus.Metric) {
	descs := make(map[string]*prometheus.Desc)
	for _, d := range c.described {
		descs[d.GetName()] = prometheus.NewDesc(d.GetName(), d.GetHelp(), d.GetLabelKeys(), nil)
	}
	for _, pod := range c.measure() {
		all := pod.GetMetrics()
		for _, of := range pod.GetContainerMetrics() {
			all = append(all, of.GetMetrics()...)
		}
		for _, v := range all {
			kind := kinds[v.GetMetricType() == runtimeapi.MetricType_COUNTER]
			metric, err := prometheus.NewConstMetric(descs[v.GetName()], kind, float64(v.GetValue().GetValue()), v.GetLabelValues()...)
			if err != nil { // in a goroutine of the registry a panic would end the daemon
				metric = prometheus.NewInvalidMetric(descs[v.GetName()], err)
			}
			out <- metric
		}
	}
}
