// Package stats measures pods and containers: cpu, memory, swap, processes and pressure by cgroups, network
// by netlink, and writable layers by the image store. A missing controller leaves its part of the answer empty.
//
// A Meter keeps the last cpu sample of each cgroup and the last measurement of each layer; Meter.mu guards the two
// maps, and is not held while anything is read. The walk of a layer may take long, on a dead disk forever: it has its
// own goroutine, and a call waits up to layerWait for all layers, or aloneWait for a single container or pod, and for
// the sum of all layers.
package stats

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
)

// Container is what is to be measured of one container. Image, StartedAt and Resources are for metrics alone.
type Container struct {
	ID         string
	Cgroup     string // below a hierarchy
	Attributes *runtimeapi.ContainerAttributes
	Image      string
	StartedAt  int64                               // nanoseconds since 1970
	Resources  *runtimeapi.LinuxContainerResources // as given
}

// Pod is what is to be measured of one pod.
type Pod struct {
	ID         string
	Cgroups    []string // the pod's own, or if it has none those of its parts
	Netns      string   // the pinned namespace, "" for the node's, whose counters are not the pod's
	Attributes *runtimeapi.PodSandboxAttributes
	Containers []Container // those that run
}

// Layers measures the writable layer of a container. That takes long for a large one.
type Layers interface {
	SnapshotUsage(ctx context.Context, containerID string) (image.Usage, error)
}

const (
	layerWait      = 50 * time.Millisecond // of a list, which then has older measurements
	aloneWait      = time.Second           // of a single container or pod, for its first measurement
	layerAge       = 10 * time.Second      // of a good measurement: the kubelet's period of housekeeping
	linksLimit     = time.Second           // for the kernel to list a pod's interfaces
	maxLinks       = 100                   // of a pod, beside eth0
	layersAtOnce   = 4
	shortestWindow = time.Second // of a rate: two callers that ask in turn get none of the milliseconds between them
	// Beyond maxKept samples or layers, those older than sampleAge are forgotten.
	maxKept   = 4096
	sampleAge = 5 * time.Minute
)

// Meter measures. Its methods may be called concurrently.
type Meter struct {
	hierarchies hierarchies
	source      Layers
	logger      *slog.Logger

	base   context.Context // ends with Close
	cancel context.CancelFunc
	walks  singleflight.Group
	slots  *semaphore.Weighted // of walks

	mu      sync.Mutex
	samples map[string]sample      // by cgroup
	layers  map[string]image.Usage // by container
}

// sample is the cpu time of a cgroup, and the rate over the window that ended then.
type sample struct {
	at    time.Time
	total time.Duration
	rate  *runtimeapi.UInt64Value // nil for the first sample
}

// Open finds the cgroup hierarchies. The context is the daemon's.
func Open(ctx context.Context, source Layers, logger *slog.Logger) (*Meter, error) {
	h, err := findHierarchies()
	if err != nil {
		return nil, err
	}
	m := &Meter{
		hierarchies: h, source: source, logger: logger, slots: semaphore.NewWeighted(layersAtOnce),
		samples: make(map[string]sample), layers: make(map[string]image.Usage),
	}
	m.base, m.cancel = context.WithCancel(ctx)
	return m, nil
}

// Close ends the walks of writable layers, and waits for them.
func (m *Meter) Close() {
	m.cancel()
	_ = m.slots.Acquire(context.Background(), layersAtOnce)
}

// Container measures one container. Without a cgroup it has only attributes and a writable layer.
func (m *Meter) Container(ctx context.Context, c Container) (*runtimeapi.ContainerStats, error) {
	m.refresh(ctx, m.waitFor(c), c)
	measured, err := m.container(c)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.ContainerStats{Attributes: c.Attributes, WritableLayer: m.writableLayer(c.ID)}, nil
	}
	return measured, err
}

// Containers measures all that have a cgroup and can be measured.
func (m *Meter) Containers(ctx context.Context, containers []Container) []*runtimeapi.ContainerStats {
	m.refresh(ctx, layerWait, containers...)
	return listed(m, containers, m.container)
}

// listed logs what cannot be measured, unless it is gone, and leaves it out.
func listed[From, To any](m *Meter, all []From, measure func(From) (To, error)) []To {
	list := make([]To, 0, len(all))
	for _, one := range all {
		measured, err := measure(one)
		if err == nil {
			list = append(list, measured)
		} else if !errdefs.IsNotFound(err) {
			m.logger.Warn("something is left out of the stats", "err", err)
		}
	}
	return list
}

func (m *Meter) container(c Container) (*runtimeapi.ContainerStats, error) {
	used, err := m.readUsage(c.ID, forStats, c.Cgroup)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ContainerStats{
		Attributes: c.Attributes, WritableLayer: m.writableLayer(c.ID),
		Cpu: m.cpuUsage(c.Cgroup, used), Memory: used.memoryUsage(), Swap: used.swapUsage(), Io: used.ioUsage(),
	}, nil
}

// Pod measures one pod. Without a cgroup it has only attributes.
func (m *Meter) Pod(ctx context.Context, p Pod) (*runtimeapi.PodSandboxStats, error) {
	m.refresh(ctx, m.waitFor(p.Containers...), p.Containers...)
	measured, err := m.pod(p)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.PodSandboxStats{Attributes: p.Attributes}, nil
	}
	return measured, err
}

// Pods measures all that have a cgroup.
func (m *Meter) Pods(ctx context.Context, pods []Pod) []*runtimeapi.PodSandboxStats {
	m.refresh(ctx, layerWait, containersOf(pods)...)
	return listed(m, pods, m.pod)
}

func containersOf(pods []Pod) (all []Container) {
	for _, p := range pods {
		all = append(all, p.Containers...)
	}
	return all
}

func (m *Meter) pod(p Pod) (*runtimeapi.PodSandboxStats, error) {
	used, err := m.readUsage(p.ID, forStats, p.Cgroups...)
	if err != nil {
		return nil, err
	}
	linux := &runtimeapi.LinuxPodSandboxStats{
		Cpu: m.cpuUsage("pod "+p.ID, used), Memory: used.memoryUsage(), Io: used.ioUsage(),
		Containers: listed(m, p.Containers, m.container),
	}
	if count := used.PidsStats.Current; count > 0 {
		linux.Process = &runtimeapi.ProcessUsage{Timestamp: used.at.UnixNano(), ProcessCount: value(count)}
	}
	if p.Netns != "" {
		if linux.Network, err = readNetwork(p.Netns); err != nil {
			m.logger.Warn("a pod's network is left out of the stats", "sandbox", p.ID, "err", err)
		}
	}
	return &runtimeapi.PodSandboxStats{Attributes: p.Attributes, Linux: linux}, nil
}

// cpuUsage has a rate from the second sample of the key on.
func (m *Meter) cpuUsage(key string, used *usage) *runtimeapi.CpuUsage {
	return &runtimeapi.CpuUsage{
		Timestamp: used.at.UnixNano(), Psi: psi(used.CpuStats.PSI), UsageCoreNanoSeconds: value(used.CpuStats.CpuUsage.TotalUsage),
		UsageNanoCores: m.rate(key, used.at, time.Duration(used.CpuStats.CpuUsage.TotalUsage)),
	}
}

// rate is the nanoseconds of cpu time used each second since the sample before, nil for the first one.
func (m *Meter) rate(key string, at time.Time, total time.Duration) *runtimeapi.UInt64Value {
	m.mu.Lock()
	defer m.mu.Unlock()
	last, found := m.samples[key]
	window := at.Sub(last.at)
	if found && window < shortestWindow {
		return last.rate
	}
	next := sample{at: at, total: total}
	if found && total >= last.total { // a new cgroup of the same name counts from zero
		next.rate = value(uint64(float64(total-last.total) / window.Seconds()))
	}
	m.samples[key] = next
	if len(m.samples) > maxKept {
		maps.DeleteFunc(m.samples, func(_ string, s sample) bool { return at.Sub(s.at) >= sampleAge })
	}
	return next.rate
}

func (m *Meter) waitFor(containers ...Container) time.Duration {
	for _, c := range containers {
		if m.layer(c.ID).Time.IsZero() {
			return aloneWait
		}
	}
	return layerWait
}

// refresh measures the layers whose last measurement is old, and waits up to the limit.
func (m *Meter) refresh(ctx context.Context, limit time.Duration, containers ...Container) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var walks []<-chan singleflight.Result
	for _, c := range containers {
		if time.Since(m.layer(c.ID).Time) >= layerAge {
			walks = append(walks, m.walks.DoChan(c.ID, func() (any, error) { return nil, m.walk(c.ID) }))
		}
	}
	for _, walk := range walks {
		select {
		case <-walk:
		case <-ctx.Done():
			return
		}
	}
}

func (m *Meter) walk(id string) error {
	if err := m.slots.Acquire(m.base, 1); err != nil {
		return err
	}
	defer m.slots.Release(1)
	used, err := m.source.SnapshotUsage(m.base, id)
	if err != nil {
		if !errdefs.IsNotFound(err) && m.base.Err() == nil {
			m.logger.Warn("a writable layer cannot be measured", "container", id, "err", err)
		}
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.layers[id] = used
	if len(m.layers) > maxKept {
		maps.DeleteFunc(m.layers, func(_ string, u image.Usage) bool { return time.Since(u.Time) >= sampleAge })
	}
	return nil
}

// layer is the last measurement, with a zero time before the first.
func (m *Meter) layer(id string) image.Usage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.layers[id]
}

// Layers adds up the last measurements of layers. It waits for a layer that was not measured yet, but not for long.
func (m *Meter) Layers(ctx context.Context, ids []string) image.Usage {
	var of []Container
	for _, id := range ids {
		of = append(of, Container{ID: id})
	}
	m.refresh(ctx, m.waitFor(of...), of...)
	sum := image.Usage{Time: time.Now()}
	for _, id := range ids {
		if used := m.layer(id); !used.Time.IsZero() {
			sum.Bytes, sum.Inodes = sum.Bytes+used.Bytes, sum.Inodes+used.Inodes
			sum.Time = time.Unix(0, min(sum.Time.UnixNano(), used.Time.UnixNano()))
		}
	}
	return sum
}

func (m *Meter) writableLayer(id string) *runtimeapi.FilesystemUsage {
	used := m.layer(id)
	if used.Time.IsZero() {
		return nil
	}
	return Filesystem(used)
}

// Filesystem shows a measurement as the CRI does.
func Filesystem(used image.Usage) *runtimeapi.FilesystemUsage {
	return &runtimeapi.FilesystemUsage{
		Timestamp: used.Time.UnixNano(), FsId: &runtimeapi.FilesystemIdentifier{Mountpoint: used.Mountpoint},
		UsedBytes: value(used.Bytes), InodesUsed: value(used.Inodes),
	}
}
