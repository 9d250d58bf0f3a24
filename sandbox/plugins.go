package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
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
	c.Update(func(f *Facts) { f.Pause = *c.prepared })
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

// Resources are those of a pod as a whole, in protobuf's JSON. The kubelet sets
// them on the pod's cgroup, which is its own; they are recorded and shown.
type Resources struct {
	Overhead  json.RawMessage `json:"overhead,omitempty"`
	Resources json.RawMessage `json:"resources,omitempty"`
}

// UpdateResources records the resources of a pod, which the kubelet has set on the
// pod's cgroup. Those that are not given stay as they are recorded.
func (s *Store) UpdateResources(ctx context.Context, id string, overhead, resources *runtimeapi.LinuxContainerResources) error {
	sb, err := s.Find(id)
	if err != nil {
		return err
	}
	machine := s.options.Machine
	err = errors.Join(validate.Resources("overhead.", overhead, machine), validate.Resources("resources.", resources, machine))
	if err != nil {
		return err
	}
	// The plugins are asked without the sandbox's lock: one that hangs does not hold up the
	// pod's end.
	steps := s.begin(ctx, sb)
	if s.hasPlugins() {
		steps.Step(stepNRIUpdate, func(ctx context.Context) error { return s.options.Plugins.UpdatePod(ctx, sb, overhead, resources) })
	}
	if err = steps.Err(); err == nil {
		err = s.recordResources(ctx, sb, overhead, resources)
	}
	if err != nil {
		return fmt.Errorf("update the resources of sandbox %s: %w", sb.ID, err)
	}
	s.notify(s.begin(ctx, sb), sb, stepNRIUpdated, Plugins.UpdatedPod)
	return nil
}

func (s *Store) recordResources(ctx context.Context, sb *Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error {
	unlock, err := sb.Acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := s.Find(sb.ID); err != nil { // a Remove was faster
		return err
	}
	next, err := sb.Resources()
	if err == nil {
		err = errors.Join(encode(&next.Overhead, overhead), encode(&next.Resources, resources))
	}
	if err != nil {
		return err
	}
	sb.Update(func(f *Facts) { f.Updated = next })
	return s.writeFacts(sb)
}

// Resources returns the resources of the pod: those of the last update, or those
// that it was made with.
func (sb *Sandbox) Resources() (*Resources, error) {
	if updated := sb.Facts().Updated; updated != nil {
		return new(*updated), nil
	}
	made, linux := &Resources{}, sb.config.GetLinux()
	return made, errors.Join(encode(&made.Overhead, linux.GetOverhead()), encode(&made.Resources, linux.GetResources()))
}

// encode keeps what is there if nothing is given.
func encode(to *json.RawMessage, given *runtimeapi.LinuxContainerResources) (err error) {
	if given != nil {
		*to, err = protojson.Marshal(given)
	}
	return err
}
