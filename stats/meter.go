package stats

import (
	"context"
	"log/slog"

	"github.com/containerd/errdefs"
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
	measured, err := m.container(c, &reader{})
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
	r := &reader{}
	for _, c := range containers {
		measured, err := m.container(c, r)
		switch {
		case err == nil:
			list = append(list, measured)
		case !errdefs.IsNotFound(err):
			m.logger.Warn("a container is left out of the stats", "container", c.ID, "err", err)
		}
	}
	return list
}

// container reads the cgroup, errdefs.ErrNotFound if there is none. The reader
// may be used again.
func (m *Meter) container(c Container, r *reader) (*runtimeapi.ContainerStats, error) {
	used, err := readUsage(m.hierarchies, c.Cgroup, r)
	if err != nil {
		return nil, err
	}
	m.warnIncomplete(c.ID, r)
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
func (m *Meter) warnIncomplete(id string, r *reader) {
	if err := r.failed(); err != nil {
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
	var containers []Container
	for _, p := range pods {
		containers = append(containers, p.Containers...)
	}
	m.layers.refresh(ctx, containers, layerWait)
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

func (m *Meter) pod(p Pod) (*runtimeapi.PodSandboxStats, error) {
	r := &reader{}
	used, err := readSum(m.hierarchies, p.Cgroups, r)
	if err != nil {
		return nil, err
	}
	m.warnIncomplete(p.ID, r)
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
