package nri

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// Update implements container.Plugins.
func (p *Plugins) Update(ctx context.Context, pod *sandbox.Sandbox, c *container.Container, asked *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, []container.Change, error) {
	ctx, t := p.begin(ctx, nothing)
	if t == nil {
		return asked, nil, nil
	}
	defer t.end()
	answer, err := t.adaptation.UpdateContainer(ctx, &adaptation.UpdateContainerRequest{
		Pod: p.pod(pod), Container: p.container(c), LinuxResources: fromCRI(asked),
	})
	if err != nil {
		return nil, nil, named(err)
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
	return asked, p.changes(others), nil
}

// changes are updates as package container has them.
func (p *Plugins) changes(updates []*api.ContainerUpdate) (changes []container.Change) {
	for _, update := range updates {
		if resources := update.GetLinux().GetResources(); resources != nil {
			changes = append(changes, container.Change{
				ID: update.GetContainerId(), Resources: p.toCRI(update.GetContainerId(), resources), Optional: update.GetIgnoreFailure(),
			})
		}
	}
	return changes
}

// updateUnsolicited makes the updates that a plugin wants by itself, and returns
// those that failed. A plugin that asks for an update of the container that it is
// just being asked about would wait for itself: it gets half of the time that it
// has for the answer.
func (p *Plugins) updateUnsolicited(ctx context.Context, updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate, err error) {
	for _, change := range p.changes(updates) {
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

// synchronize sends a plugin the pods and containers that there are, and makes the
// updates that it answers with.
func (p *Plugins) synchronize(ctx context.Context, send adaptation.SyncCB) error {
	updates, err := send(ctx, p.allPods(), p.allContainers())
	if err != nil {
		return err
	}
	// A failure is in the log: the plugin has been synchronized.
	_, _ = p.updateUnsolicited(ctx, updates)
	return nil
}

// allPods are those that plugins have been asked about, the oldest first.
func (p *Plugins) allPods() (pods []*api.PodSandbox) {
	known := make(map[string]*sandbox.Sandbox)
	for _, sb := range p.pods.List() {
		known[sb.ID] = sb
	}
	p.mu.Lock()
	for id, sb := range p.podsMade {
		known[id] = sb
	}
	p.mu.Unlock()
	for _, sb := range sortedByAge(known, func(sb *sandbox.Sandbox) int64 { return sb.CreatedAt }) {
		pods = append(pods, p.pod(sb))
	}
	return pods
}

// allContainers are those that have not ended, the oldest first.
func (p *Plugins) allContainers() (containers []*api.Container) {
	known := make(map[string]*api.Container)
	p.mu.Lock()
	for id, c := range p.containersMade {
		known[id] = copyOf(c)
	}
	p.mu.Unlock()
	for _, c := range p.containers.List() {
		if state := c.State(); state == runtimeapi.ContainerState_CONTAINER_CREATED || state == runtimeapi.ContainerState_CONTAINER_RUNNING {
			known[c.ID] = p.container(c)
		} else {
			delete(known, c.ID)
		}
	}
	return sortedByAge(known, func(c *api.Container) int64 { return c.GetCreatedAt() })
}
