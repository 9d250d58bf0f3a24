package sandbox

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
)

// Plugins take part in the lives of pods, as NRI plugins do (package nri). Each
// call ends, by limits of its own or with its context. An error of RunPod or
// UpdatePod refuses the operation; those of the others are only logged.
type Plugins interface {
	// Enabled reports whether there may be plugins now. While it does not, no other
	// method is called; plugins that come later are sent the pods that there are.
	Enabled() bool
	// RunPod is called when the pod has its network, and before it is Ready and
	// before any container.
	RunPod(ctx context.Context, sb *Sandbox) error
	// UpdatePod is called before the resources of a pod are recorded, UpdatedPod
	// after that.
	UpdatePod(ctx context.Context, sb *Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error
	UpdatedPod(ctx context.Context, sb *Sandbox) error
	// StopPod is called when the containers have ended and the namespaces are
	// still there, RemovePod when nothing but files is left.
	StopPod(ctx context.Context, sb *Sandbox) error
	RemovePod(ctx context.Context, sb *Sandbox) error
}

// hasPlugins reports whether there may be plugins now.
func (s *Store) hasPlugins() bool { return s.options.Plugins != nil && s.options.Plugins.Enabled() }

// announce asks the plugins whether the pod may run.
func (c *creation) announce(ctx context.Context) error {
	c.update(func(f *Facts) { f.Pause = c.starter.facts })
	return c.owner.options.Plugins.RunPod(ctx, c.Sandbox)
}

// announceStop notifies the plugins once that the pod stops, if they know of it. The
// sandbox's lock is held.
func (s *Store) announceStop(steps *step.Sequence, sb *Sandbox) {
	if sb.announced && !sb.stopAnnounced {
		sb.stopAnnounced = true
		s.notify(steps, sb, stepNRIStop, Plugins.StopPod)
	}
}

// announceRemoval is the same for the pod's removal.
func (s *Store) announceRemoval(steps *step.Sequence, sb *Sandbox) {
	if sb.announced {
		sb.announced = false
		s.notify(steps, sb, stepNRIRemove, Plugins.RemovePod)
	}
}

// notify tells the plugins what was done to a pod; an error is logged and changes
// nothing.
func (s *Store) notify(steps *step.Sequence, sb *Sandbox, name step.Name, call func(Plugins, context.Context, *Sandbox) error) {
	if !s.hasPlugins() {
		return
	}
	err := steps.Do(name, func(ctx context.Context) error { return call(s.options.Plugins, ctx, sb) })
	if err != nil {
		s.log(sb).Warn("an NRI plugin was not notified of what was done to a pod", "err", err)
	}
}

// askUpdate asks the plugins about an update, without the sandbox's lock: one
// that hangs does not hold up the pod's end.
func (s *Store) askUpdate(ctx context.Context, sb *Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error {
	if !s.hasPlugins() {
		return nil
	}
	return s.begin(ctx, sb).Do(stepNRIUpdate, func(ctx context.Context) error {
		return s.options.Plugins.UpdatePod(ctx, sb, overhead, resources)
	})
}
