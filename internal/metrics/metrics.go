// Package metrics shows the runtime to Prometheus. It owns one registry and one
// listener, off unless an address is configured. What can be counted when it
// is asked for is read from its owner at each scrape; only what passes (calls,
// steps, exits) is kept here. No label has an unbounded set of values.
package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// Metrics are the runtime's metrics. Observe and its kin may be called by many
// goroutines, from the moment that they are made.
type Metrics struct {
	registry                    *prometheus.Registry
	calls, steps, plugins, pull *prometheus.HistogramVec
	exits                       *prometheus.CounterVec
	reloaded, reloadedAt        prometheus.Gauge
	cadvisor                    cadvisor
	pulled, oomKills, lost      prometheus.Counter

	// named are the CNI plugins that have a label value of their own.
	named *names

	nri nri
}

// New makes the metrics.
func New() *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), named: newNames()}
	m.calls, m.steps = m.histogram(rpcSeconds, 0.0005, 4, 10), m.histogram(stepSeconds, 0.001, 4, 8)
	m.plugins, m.pull = m.histogram(pluginSeconds, 0.004, 4, 8), m.histogram(pullSeconds, 0.05, 2, 16)
	m.exits = m.counter(exits)
	m.pulled, m.oomKills, m.lost = m.counter(pulledBytes).WithLabelValues(), m.counter(oomKills).WithLabelValues(), m.counter(lost).WithLabelValues()
	m.reloaded, m.reloadedAt = m.gauge(reloadOK), m.gauge(reloadAt)
	m.ObserveReload(true) // the start
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

func (m *Metrics) gauge(name string) prometheus.Gauge {
	f, _ := family(name)
	made := prometheus.NewGauge(prometheus.GaugeOpts{Name: f.Name, Help: f.Help})
	m.registry.MustRegister(made)
	return made
}

// ObserveReload notes whether a configuration was put into force.
func (m *Metrics) ObserveReload(ok bool) {
	if !ok {
		m.reloaded.Set(0)
		return
	}
	m.reloaded.Set(1)
	m.reloadedAt.SetToCurrentTime()
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
func (m *Metrics) Watch(sources Sources) {
	m.registry.MustRegister(&counts{sources})
	m.cadvisor = sources.Cadvisor
}

// Handler answers a scrape.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Serve answers /metrics and /metrics/cadvisor on a TCP address until the context ends;
// without TLS if that is nil.
func (m *Metrics) Serve(ctx context.Context, address string, secure *tls.Config, logger *slog.Logger) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen for metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", m.Handler())
	mux.Handle("/metrics/cadvisor", m.cadvisor.handler())
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	logger.Info("serving metrics", "address", listener.Addr())
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}

// Family is a family of metrics, as docs/metrics.md describes it.
type Family struct {
	// Name begins with "minicri_".
	Name string
	// Kind is "counter", "gauge" or "histogram".
	Kind string
	Help string
	// Labels are the labels with what they may be: no set is unbounded.
	Labels []Label
}

// Label is a label of a family and its values in words.
type Label struct{ Name, Values string }

// The names of the families.
const (
	buildInfo      = "minicri_build_info"
	rpcSeconds     = "minicri_rpc_seconds"
	stepSeconds    = "minicri_sandbox_step_seconds"
	pluginSeconds  = "minicri_cni_plugin_seconds"
	pullSeconds    = "minicri_image_pull_seconds"
	pulledBytes    = "minicri_image_pulled_bytes_total"
	exits          = "minicri_container_exits_total"
	oomKills       = "minicri_container_oom_kills_total"
	lost           = "minicri_supervisor_restarts_total"
	dropped        = "minicri_events_dropped_total"
	sandboxCount   = "minicri_sandboxes"
	containerCount = "minicri_containers"
	pending        = "minicri_attachments_pending"
	oldestPending  = "minicri_attachments_pending_oldest_seconds"
	drifted        = "minicri_attachments_drifted"
	quarantined    = "minicri_records_quarantined"
	stuck          = "minicri_plugin_runs_stuck"
	networkReady   = "minicri_network_ready"
	streamsOpen    = "minicri_streams_open"
	reloadOK       = "minicri_config_last_reload_successful"
	reloadAt       = "minicri_config_last_reload_success_timestamp_seconds"
	imageCount     = "minicri_images"
	diskSize       = "minicri_disk_size_bytes"
	diskFree       = "minicri_disk_free_bytes"
	inodesFree     = "minicri_disk_free_inodes"
)

// Families are all families that this package makes, in the order of the page;
// those of the Go runtime and of the process (go_, process_: its memory, CPU and
// descriptors) are client_golang's own.
func Families() []Family {
	outcome := Label{"outcome", "ok, error"}
	return []Family{
		{buildInfo, "gauge", "1, with the version of the daemon.", []Label{{"version", "the version"}, {"goversion", "the version of Go"}}},
		{rpcSeconds, "histogram", "How long each call of the CRI took.", []Label{{"method", "the methods of the CRI: RunPodSandbox"}, {"code", "the codes of gRPC: OK"}}},
		{stepSeconds, "histogram", "How long each step of a pod's or container's life took.", []Label{{"step", "the steps of pods and containers: pod/cni add"}, outcome}},
		{pluginSeconds, "histogram", "How long each run of a CNI plugin took, with the IPAM plugin that it runs.", []Label{{"plugin", "the first 64 plugins that were run, and other"}, {"verb", "ADD, DEL, CHECK, STATUS, GC, VERSION, other"}, outcome}},
		{pullSeconds, "histogram", "How long each pull of an image took. Pulls that were merged count once.", []Label{outcome}},
		{pulledBytes, "counter", "Bytes of images that registries sent, of failed pulls too.", nil},
		{exits, "counter", "Containers that have ended.", []Label{{"reason", "Completed, Error, OOMKilled, StartError, Unknown, other"}}},
		{oomKills, "counter", "Containers that were killed because they, or their pod, used all of their memory.", nil},
		{lost, "counter", "Supervisors that died and were replaced.", nil},
		{dropped, "counter", "Events that a consumer was too slow for; its subscription ended with each.", nil},
		{"minicri_nri_requests_total", "counter", "Requests to NRI plugins; no rows while there are none.", []Label{{"plugin", "the NRI plugins"}, {"request", "the requests of NRI"}, {"outcome", "ok, error, timeout, lost"}}},
		{"minicri_nri_request_seconds", "histogram", "How long NRI plugins took for their answers.", []Label{{"plugin", "the NRI plugins"}, {"request", "the requests of NRI"}}},
		{"minicri_nri_plugins", "gauge", "NRI plugins that are connected.", nil},
		{sandboxCount, "gauge", "Pod sandboxes.", []Label{{"state", "ready, notready, building"}}},
		{containerCount, "gauge", "Containers.", []Label{{"state", "created, running, exited, unknown"}}},
		{pending, "gauge", "Attachments whose CNI DEL has failed and is being repeated.", nil},
		{oldestPending, "gauge", "How long ago the first DEL of the oldest of them failed; 0 without any.", nil},
		{drifted, "gauge", "Attachments that CNI CHECK found changed.", nil},
		{quarantined, "gauge", "Records of pods, containers and attachments that cannot be read.", nil},
		{stuck, "gauge", "Runs of CNI plugins whose processes were killed and did not end.", nil},
		{networkReady, "gauge", "Whether pods can be attached: 1, or 0.", nil},
		{streamsOpen, "gauge", "Sessions of exec, attach and port-forward.", nil},
		{reloadOK, "gauge", "Whether the configuration that was read last is in force: 1, or 0.", nil},
		{reloadAt, "gauge", "When a configuration was put into force last, by a start or a reload.", nil},
		{imageCount, "gauge", "Images on the node.", nil},
		{diskSize, "gauge", "Size of the file system of root, which has images and writable layers.", nil},
		{diskFree, "gauge", "What is free of it for everybody.", nil},
		{inodesFree, "gauge", "Inodes that are free there; no value where the file system does not count them, as btrfs.", nil},
	}
}

// family panics for a name that Families does not have: that is a mistake in
// the program.
func family(name string) (f Family, labels []string) {
	for _, f := range Families() {
		if f.Name == name {
			for _, label := range f.Labels {
				labels = append(labels, label.Name)
			}
			return f, labels
		}
	}
	panic("no metric " + name)
}

// Sources are the owners of what is counted at each scrape.
type Sources struct {
	// Version is the daemon's.
	Version    string
	Sandboxes  *sandbox.Store
	Containers *container.Store
	Networks   *network.CNI
	Images     *image.Store
	// Cadvisor measures pods and containers.
	Cadvisor func() []Value
	// Root is the durable directory.
	Root string
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
	emit(imageCount, float64(len(c.Images.List())))
	disk(c.Root, emit)
	emit(buildInfo, 1, c.Version, runtime.Version())
}

// emitter puts out one value.
type emitter func(name string, value float64, labels ...string)

func disk(root string, emit emitter) {
	var disk unix.Statfs_t
	if unix.Statfs(root, &disk) != nil {
		return
	}
	emit(diskSize, float64(disk.Blocks)*float64(disk.Bsize))
	emit(diskFree, float64(disk.Bavail)*float64(disk.Bsize))
	if disk.Files > 0 { // btrfs makes inodes as it needs them, and counts none
		emit(inodesFree, float64(disk.Ffree))
	}
}

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
