// Package stats measures pods and containers: cpu, memory, swap, processes and
// pressure from the kernel's cgroup files (github.com/opencontainers/cgroups), network
// counters by netlink, and the writable layers by the image store.
//
// It owns no container and no pod: the caller says what is to be measured, and
// where. It keeps the last sample of each cgroup's cpu, from which a rate follows, and
// the last measurement of each writable layer. A controller that is not there leaves its
// part of the answer empty.
//
// Meter.mu guards these two maps and is not held while anything is read. Walking a
// writable layer may take long, on a dead disk without end: each walk has a goroutine,
// and a call waits no longer than layerWait for all of them together, or aloneWait for a
// single container or pod. Close ends the walks.
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

// Container is what is to be measured of one container.
type Container struct {
	ID string
	// Cgroup is its path below a hierarchy.
	Cgroup     string
	Attributes *runtimeapi.ContainerAttributes
	// Image, StartedAt (nanoseconds since 1970) and Resources, what it was
	// given, are for the metrics alone.
	Image     string
	StartedAt int64
	Resources *runtimeapi.LinuxContainerResources
}

// Pod is what is to be measured of one pod.
type Pod struct {
	ID string
	// Cgroups are the paths whose sum the pod uses: the pod's own cgroup, or
	// those of all its parts if it has none.
	Cgroups []string
	// Netns is where its network namespace is pinned, "" for the node's, whose
	// counters are not the pod's.
	Netns      string
	Attributes *runtimeapi.PodSandboxAttributes
	// Containers are those that run.
	Containers []Container
}

// Layers measures the writable layer of a container, which may take as long as
// the layer is large.
type Layers interface {
	SnapshotUsage(ctx context.Context, containerID string) (image.Usage, error)
}

const (
	// layerWait is how long a list waits for layers that are being walked; then
	// it answers with what was measured before.
	layerWait = 50 * time.Millisecond
	// aloneWait is how long a call about a single container or pod waits for a
	// first measurement.
	aloneWait = time.Second
	// layerAge is how long a measurement is good: the kubelet's period.
	layerAge = 10 * time.Second
	// layersAtOnce are walked concurrently.
	layersAtOnce = 4
	// shortestWindow is the least time that a rate is taken over: two callers that
	// ask in turn get no rate of the few milliseconds between them.
	shortestWindow = time.Second
	// maxKept is how many samples and layers are kept before those are forgotten that
	// are older than sampleAge.
	maxKept   = 4096
	sampleAge = 5 * time.Minute
)

// Meter measures. Its methods may be called side by side.
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

// sample is the cpu time of a cgroup, and the rate over the window that ended then, nil
// for the first sample.
type sample struct {
	at    time.Time
	total time.Duration
	rate  *runtimeapi.UInt64Value
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

// Close ends the walks of writable layers, and waits for their end.
func (m *Meter) Close() {
	m.cancel()
	_ = m.slots.Acquire(context.Background(), layersAtOnce) // it has no other error than the context's
}

// Container measures one container. One that does not run has no cgroup, and
// no more than its attributes and its writable layer.
func (m *Meter) Container(ctx context.Context, c Container) (*runtimeapi.ContainerStats, error) {
	m.refresh(ctx, m.waitFor(c), c)
	measured, err := m.container(c)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.ContainerStats{Attributes: c.Attributes, WritableLayer: m.writableLayer(c.ID)}, nil
	}
	return measured, err
}

// Containers measures all that have a cgroup. What has ended in the meantime,
// or cannot be measured, is left out.
func (m *Meter) Containers(ctx context.Context, containers []Container) []*runtimeapi.ContainerStats {
	m.refresh(ctx, layerWait, containers...)
	return listed(m, containers, m.container)
}

// listed measures those that can be measured.
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

// container reads the cgroup, errdefs.ErrNotFound if there is none.
func (m *Meter) container(c Container) (*runtimeapi.ContainerStats, error) {
	used, err := m.readUsage(c.ID, forStats, c.Cgroup)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ContainerStats{
		Attributes:    c.Attributes,
		Cpu:           m.cpuUsage(c.Cgroup, used),
		Memory:        used.memoryUsage(),
		WritableLayer: m.writableLayer(c.ID),
		Swap:          used.swapUsage(),
		Io:            used.ioUsage(),
	}, nil
}

// Pod measures one pod. One that does not run has no cgroup, and no more than
// its attributes.
func (m *Meter) Pod(ctx context.Context, p Pod) (*runtimeapi.PodSandboxStats, error) {
	m.refresh(ctx, m.waitFor(p.Containers...), p.Containers...)
	measured, err := m.pod(p)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.PodSandboxStats{Attributes: p.Attributes}, nil
	}
	return measured, err
}

// Pods measures all that have a cgroup, and leaves out the others.
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
		Cpu:        m.cpuUsage("pod "+p.ID, used),
		Memory:     used.memoryUsage(),
		Containers: listed(m, p.Containers, m.container),
		Io:         used.ioUsage(),
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

// cpuUsage has a rate from the second sample on; samples are kept by the key.
func (m *Meter) cpuUsage(key string, used *usage) *runtimeapi.CpuUsage {
	return &runtimeapi.CpuUsage{
		Timestamp:            used.at.UnixNano(),
		UsageCoreNanoSeconds: value(used.CpuStats.CpuUsage.TotalUsage),
		UsageNanoCores:       m.rate(key, used.at, time.Duration(used.CpuStats.CpuUsage.TotalUsage)),
		Psi:                  psi(used.CpuStats.PSI),
	}
}

// rate is how many nanoseconds of cpu time the cgroup uses each second, since
// the sample before; nil if this is the first one.
func (m *Meter) rate(key string, at time.Time, total time.Duration) *runtimeapi.UInt64Value {
	m.mu.Lock()
	defer m.mu.Unlock()
	last, found := m.samples[key]
	window := at.Sub(last.at)
	if found && window < shortestWindow {
		return last.rate
	}
	next := sample{at: at, total: total}
	if found && total >= last.total { // a cgroup that was made again under its old name counts from zero
		next.rate = value(uint64(float64(total-last.total) / window.Seconds()))
	}
	m.samples[key] = next
	if len(m.samples) > maxKept {
		maps.DeleteFunc(m.samples, func(_ string, s sample) bool { return at.Sub(s.at) >= sampleAge })
	}
	return next.rate
}

// waitFor is how long a call about single containers waits for their layers.
func (m *Meter) waitFor(containers ...Container) time.Duration {
	for _, c := range containers {
		if m.layer(c.ID).Time.IsZero() {
			return aloneWait
		}
	}
	return layerWait
}

// refresh measures the layers whose last measurement is old, and waits for no longer
// than the limit.
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

// layer is the last measurement; its time is zero before the first has ended.
func (m *Meter) layer(id string) image.Usage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.layers[id]
}

// writableLayer is nil before the first measurement has ended.
func (m *Meter) writableLayer(id string) *runtimeapi.FilesystemUsage {
	used := m.layer(id)
	if used.Time.IsZero() {
		return nil
	}
	return &runtimeapi.FilesystemUsage{
		Timestamp:  used.Time.UnixNano(),
		FsId:       &runtimeapi.FilesystemIdentifier{Mountpoint: used.Mountpoint},
		UsedBytes:  value(used.Bytes),
		InodesUsed: value(used.Inodes),
	}
}
