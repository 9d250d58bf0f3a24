// Package stats measures pods and containers: cpu, memory, swap, processes and
// pressure from the kernel's cgroup files, network counters by netlink, and
// the writable layers by the image store.
//
// It owns no container and no pod: the caller says what is to be measured, and
// where. What it keeps is the last sample of each cgroup's cpu, from
// which a rate follows, and the last measurement of each writable layer
// (layer.go). Both are forgotten when they were not asked for in a while.
//
// The cgroup files are read by github.com/opencontainers/cgroups. A controller that is
// not there, or cannot be read, leaves its part of the answer empty. On a hybrid machine
// pressure is read from the unified hierarchy, if the container has a cgroup there.
//
// # Locks
//
// rates.mu and layers.mu guard a map each and are never held while anything is
// read. Walking a writable layer may take long, on a dead disk without end: it is
// done in a goroutine of its own, one for each container and a few at once; a
// call waits no longer than layerWait for all of them together, or aloneWait for a
// single container or pod. Close ends the waiting and the walks.
package stats

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
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

// Meter measures. Its methods may be called side by side.
type Meter struct {
	hierarchies hierarchies
	rates       *rates
	layers      *layers
	logger      *slog.Logger
}

// Open finds the cgroup hierarchies. The context is the daemon's.
func Open(ctx context.Context, source Layers, logger *slog.Logger) (*Meter, error) {
	h, err := findHierarchies()
	if err != nil {
		return nil, err
	}
	return &Meter{hierarchies: h, rates: newRates(), layers: newLayers(ctx, source, logger), logger: logger}, nil
}

// Close ends the walks of writable layers, and waits for their end.
func (m *Meter) Close() { m.layers.close() }

// Container measures one container. One that does not run has no cgroup, and
// no more than its attributes and its writable layer.
func (m *Meter) Container(ctx context.Context, c Container) (*runtimeapi.ContainerStats, error) {
	m.layers.refreshOne(ctx, []Container{c})
	measured, err := m.container(c)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.ContainerStats{Attributes: c.Attributes, WritableLayer: m.writableLayer(c.ID)}, nil
	}
	return measured, err
}

// Containers measures all that have a cgroup. What has ended in the meantime,
// or cannot be measured, is left out.
func (m *Meter) Containers(ctx context.Context, containers []Container) []*runtimeapi.ContainerStats {
	m.layers.refresh(ctx, containers, layerWait)
	return m.containers(containers)
}

// containers is Containers after the layers are fresh.
func (m *Meter) containers(containers []Container) []*runtimeapi.ContainerStats {
	list := make([]*runtimeapi.ContainerStats, 0, len(containers))
	for _, c := range containers {
		measured, err := m.container(c)
		switch {
		case err == nil:
			list = append(list, measured)
		case !errdefs.IsNotFound(err):
			m.logger.Warn("a container is left out of the stats", "container", c.ID, "err", err)
		}
	}
	return list
}

// container reads the cgroup, errdefs.ErrNotFound if there is none.
func (m *Meter) container(c Container) (*runtimeapi.ContainerStats, error) {
	used, err := readUsage(m.hierarchies, c.Cgroup, forStats)
	if err != nil {
		return nil, err
	}
	m.warnIncomplete(c.ID, used)
	return &runtimeapi.ContainerStats{
		Attributes:    c.Attributes,
		Cpu:           m.cpuUsage(c.Cgroup, used),
		Memory:        used.memoryUsage(),
		WritableLayer: m.writableLayer(c.ID),
		Swap:          used.swapUsage(),
		Io:            used.ioUsage(),
	}, nil
}

// warnIncomplete logs what could not be read of a container or pod.
func (m *Meter) warnIncomplete(id string, used *usage) {
	if err := used.incomplete; err != nil {
		m.logger.Warn("some numbers are left out of the stats", "id", id, "err", err)
	}
}

// Pod measures one pod. One that does not run has no cgroup, and no more than
// its attributes.
func (m *Meter) Pod(ctx context.Context, p Pod) (*runtimeapi.PodSandboxStats, error) {
	m.layers.refreshOne(ctx, p.Containers)
	measured, err := m.pod(p)
	if errdefs.IsNotFound(err) {
		return &runtimeapi.PodSandboxStats{Attributes: p.Attributes}, nil
	}
	return measured, err
}

// Pods measures all that have a cgroup, and leaves out the others.
func (m *Meter) Pods(ctx context.Context, pods []Pod) []*runtimeapi.PodSandboxStats {
	m.layers.refresh(ctx, containersOf(pods), layerWait)
	list := make([]*runtimeapi.PodSandboxStats, 0, len(pods))
	for _, p := range pods {
		measured, err := m.pod(p)
		switch {
		case err == nil:
			list = append(list, measured)
		case !errdefs.IsNotFound(err):
			m.logger.Warn("a pod is left out of the stats", "sandbox", p.ID, "err", err)
		}
	}
	return list
}

func containersOf(pods []Pod) (all []Container) {
	for _, p := range pods {
		all = append(all, p.Containers...)
	}
	return all
}

func (m *Meter) pod(p Pod) (*runtimeapi.PodSandboxStats, error) {
	used, err := readSum(m.hierarchies, p.Cgroups, forStats)
	if err != nil {
		return nil, err
	}
	m.warnIncomplete(p.ID, used)
	return &runtimeapi.PodSandboxStats{
		Attributes: p.Attributes,
		Linux: &runtimeapi.LinuxPodSandboxStats{
			Cpu:        m.cpuUsage("pod "+p.ID, used),
			Memory:     used.memoryUsage(),
			Network:    m.network(p),
			Process:    used.processUsage(),
			Containers: m.containers(p.Containers),
			Io:         used.ioUsage(),
		},
	}, nil
}

// network is nil where it cannot be read: the rest of the pod's stats can.
func (m *Meter) network(p Pod) *runtimeapi.NetworkUsage {
	if p.Netns == "" {
		return nil
	}
	used, err := readNetwork(p.Netns)
	if err != nil {
		m.logger.Warn("a pod's network is left out of the stats", "sandbox", p.ID, "err", err)
	}
	return used
}

// shortestWindow is the least time that a rate is taken over. Who asks again
// sooner gets the same rate: two that ask in turn must not leave each other
// with the few milliseconds between them.
const shortestWindow = time.Second

// sampleAge is how long a sample without a request is kept. It is far above
// the periods in which a node is asked for all its stats.
const sampleAge = 5 * time.Minute

// rates keeps one sample for each cgroup.
type rates struct {
	mu      sync.Mutex // guards samples and pruned
	samples map[string]sample
	pruned  time.Time
}

// sample is the cpu time at a moment, and the rate over the window that ended
// there, 0 and unknown if it was the first.
type sample struct {
	cpu
	nanoCores uint64
	known     bool
}

func newRates() *rates { return &rates{samples: make(map[string]sample)} }

// rate is how many nanoseconds of cpu time the cgroup uses each second, since
// the sample before; unknown if this is the first one.
func (r *rates) rate(path string, now cpu) (nanoCores uint64, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune(now.at)
	last, found := r.samples[path]
	window := now.at.Sub(last.at)
	if found && window < shortestWindow {
		return last.nanoCores, last.known
	}
	next := sample{cpu: now}
	// A cgroup that was made again under its old name counts from zero.
	if found && now.total >= last.total {
		next.nanoCores, next.known = uint64(float64(now.total-last.total)/window.Seconds()), true
	}
	r.samples[path] = next
	return next.nanoCores, next.known
}

// prune forgets the samples of cgroups that have gone; mu is held.
func (r *rates) prune(now time.Time) {
	if now.Sub(r.pruned) < sampleAge {
		return
	}
	r.pruned = now
	for path, last := range r.samples {
		if now.Sub(last.at) >= sampleAge {
			delete(r.samples, path)
		}
	}
}

// readSum adds up cgroups. Those that are gone add nothing; errdefs.ErrNotFound
// if all are. A sum of several has no pressure, which cannot be added, and no
// limit: each part has one of its own.
func readSum(h hierarchies, paths []string, wanted cgroups.Controller) (*usage, error) {
	var sum *usage
	var gone error
	for _, path := range paths {
		part, err := readUsage(h, path, wanted)
		switch {
		case errdefs.IsNotFound(err):
			gone = err
		case err != nil:
			return nil, err
		case sum == nil:
			sum = part
		default:
			sum.add(part)
		}
	}
	if sum == nil {
		return nil, gone
	}
	return sum, nil
}

func (u *usage) add(other *usage) {
	u.all.CpuStats.PSI, u.all.MemoryStats.PSI, u.all.BlkioStats.PSI = nil, nil, nil
	u.all.PidsStats.Current += other.all.PidsStats.Current
	if u.cpu != nil && other.cpu != nil {
		u.cpu.total += other.cpu.total
	}
	if u.memory != nil && other.memory != nil {
		u.memory.add(other.memory)
	}
}

func (m *memory) add(other *memory) {
	m.limit = unlimited
	m.usage += other.usage
	m.inactiveFile += other.inactiveFile
	m.anon += other.anon
	m.faults += other.faults
	m.major += other.major
}
