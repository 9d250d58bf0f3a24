package nri

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// Update implements container.Plugins.
func (p *Plugins) Update(ctx context.Context, pod *sandbox.Sandbox, c *container.Container, asked *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, []container.Change, error) {
	var answer *adaptation.UpdateContainerResponse
	updaters, err := p.request(ctx, func(*door) {}, func(a *adaptation.Adaptation) (err error) {
		answer, err = a.UpdateContainer(ctx, &adaptation.UpdateContainerRequest{
			Pod: p.pod(pod), Container: p.container(c), LinuxResources: fromCRI(asked),
		})
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	var others []*api.ContainerUpdate
	for _, update := range answer.GetUpdate() {
		switch {
		case update.GetContainerId() != c.ID:
			others = append(others, update)
		case update.GetLinux().GetResources() != nil:
			score := asked.GetOomScoreAdj() // plugins are not asked about it
			asked = p.toCRI(c.ID, update.GetLinux().GetResources())
			asked.OomScoreAdj = score
		}
	}
	return asked, p.changes(updaters, others), nil
}

func (p *Plugins) changes(plugins []string, updates []*api.ContainerUpdate) (changes []container.Change) {
	for _, update := range updates {
		if resources := update.GetLinux().GetResources(); resources != nil {
			changes = append(changes, container.Change{
				ID: update.GetContainerId(), Plugins: plugins, Resources: p.toCRI(update.GetContainerId(), resources), Optional: update.GetIgnoreFailure(),
			})
		}
	}
	return changes
}

// updateUnsolicited makes the updates that a plugin wants by itself, and returns those that failed.
// Each gets half of a plugin's time to answer, since it may wait for just that plugin's answer.
func (p *Plugins) updateUnsolicited(ctx context.Context, updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate, err error) {
	for _, change := range p.changes(nil, updates) {
		within, cancel := context.WithTimeout(ctx, p.settings().Request/2)
		problem := p.containers.UpdateUnsolicited(within, change.ID, change.Resources)
		cancel()
		if problem == nil {
			continue
		}
		p.options.Logger.Warn("an update that an NRI plugin asked for was not made", "container", change.ID, "err", problem)
		at := slices.IndexFunc(updates, func(u *api.ContainerUpdate) bool { return u.GetContainerId() == change.ID })
		failed = append(failed, updates[at])
		if !change.Optional && err == nil {
			err = fmt.Errorf("update container %s: %w", change.ID, problem)
		}
	}
	return failed, err
}

// synchronize sends a plugin that joins all pods and containers, and makes the updates that it
// answers with. The plugin has the time of a registration, as no plugin is asked until then.
func (p *Plugins) synchronize(ctx context.Context, d *door, send adaptation.SyncCB) error {
	limits := p.settings()
	adaptation.SetPluginRequestTimeout(max(limits.Request, limits.Registration))
	updates, err := send(ctx, p.allPods(d), p.allContainers(d))
	adaptation.SetPluginRequestTimeout(p.settings().Request)
	if err != nil {
		return err
	}
	name := d.synchronized()
	p.mu.Lock()
	delete(p.away, name)
	p.mu.Unlock()
	_, _ = p.updateUnsolicited(ctx, updates) // logs its failures
	return nil
}

// allPods returns the pods that plugins have been asked about.
func (p *Plugins) allPods(d *door) (pods []*api.PodSandbox) {
	d.mu.Lock()
	known := maps.Clone(d.podsMade)
	d.mu.Unlock()
	for _, sb := range p.pods.List() {
		known[sb.ID] = sb
	}
	for _, sb := range known {
		pods = append(pods, p.pod(sb))
	}
	return pods
}

func (p *Plugins) allContainers(d *door) []*api.Container {
	d.mu.Lock()
	known := maps.Clone(d.containersMade)
	d.mu.Unlock()
	for _, c := range p.containers.List() {
		if state := c.State(); state == runtimeapi.ContainerState_CONTAINER_CREATED || state == runtimeapi.ContainerState_CONTAINER_RUNNING {
			known[c.ID] = p.container(c)
		} else {
			delete(known, c.ID)
		}
	}
	return slices.Collect(maps.Values(known))
}

// fromCRI converts resources of the CRI, in which zero means unset.
func fromCRI(r *runtimeapi.LinuxContainerResources) *api.LinuxResources {
	if r == nil {
		return nil
	}
	specified := func(value int64) any {
		if value == 0 {
			return nil
		}
		return value
	}
	to := &api.LinuxResources{
		Cpu: &api.LinuxCPU{
			Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems(), Shares: api.UInt64(specified(r.GetCpuShares())),
			Quota: api.Int64(specified(r.GetCpuQuota())), Period: api.UInt64(specified(r.GetCpuPeriod())),
		},
		Memory: &api.LinuxMemory{
			Limit: api.Int64(specified(r.GetMemoryLimitInBytes())), Swap: api.Int64(specified(r.GetMemorySwapLimitInBytes())),
		},
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, limit := range r.GetHugepageLimits() {
		to.HugepageLimits = append(to.HugepageLimits, &api.HugepageLimit{PageSize: limit.GetPageSize(), Limit: limit.GetLimit()})
	}
	return to
}

// toCRI converts resources of NRI. It leaves out, and logs, what the CRI cannot update.
func (p *Plugins) toCRI(id string, r *api.LinuxResources) *runtimeapi.LinuxContainerResources {
	cpu, memory := r.GetCpu(), r.GetMemory()
	to := &runtimeapi.LinuxContainerResources{
		CpuShares: int64(cpu.GetShares().GetValue()), CpuQuota: cpu.GetQuota().GetValue(), CpuPeriod: int64(cpu.GetPeriod().GetValue()),
		CpusetCpus: cpu.GetCpus(), CpusetMems: cpu.GetMems(),
		MemoryLimitInBytes: memory.GetLimit().GetValue(), MemorySwapLimitInBytes: memory.GetSwap().GetValue(),
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, limit := range r.GetHugepageLimits() {
		to.HugepageLimits = append(to.HugepageLimits, &runtimeapi.HugepageLimit{PageSize: limit.GetPageSize(), Limit: limit.GetLimit()})
	}
	if r.GetPids() != nil || r.GetBlockioClass() != nil || r.GetRdtClass() != nil || memory.GetReservation() != nil || memory.GetSwappiness() != nil ||
		memory.GetDisableOomKiller() != nil || cpu.GetRealtimePeriod() != nil || cpu.GetRealtimeRuntime() != nil {
		p.options.Logger.Warn("an NRI plugin wants to update what only a new container can get: pids, classes, reservation, swappiness, the OOM killer or realtime; this part is left out",
			"container", id)
	}
	return to
}
