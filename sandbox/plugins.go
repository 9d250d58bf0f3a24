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

// Plugins take part in the lives of pods (package nri). Each call ends, by limits of its own or with
// its context. An error of RunPod or UpdatePod refuses the operation; other errors are only logged.
type Plugins interface {
	// Enabled reports whether there may be plugins. If not, nothing else is called; later ones get all pods.
	Enabled() bool
	// RunPod is called when the pod has its network, before it is Ready.
	RunPod(ctx context.Context, sb *Sandbox) error
	// UpdatePod is called before the resources of a pod are recorded, UpdatedPod afterwards.
	UpdatePod(ctx context.Context, sb *Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error
	UpdatedPod(ctx context.Context, sb *Sandbox) error
	// StopPod is called after the end of the containers, RemovePod when only files are left.
	StopPod(ctx context.Context, sb *Sandbox) error
	RemovePod(ctx context.Context, sb *Sandbox) error
}

func (s *Store) hasPlugins() bool { return s.options.Plugins != nil && s.options.Plugins.Enabled() }

// notify tells the plugins what was done to a pod; an error is only logged.
func (s *Store) notify(steps *step.Sequence, sb *Sandbox, name step.Name, call func(Plugins, context.Context, *Sandbox) error) {
	if !s.hasPlugins() {
		return
	}
	err := steps.Do(name, func(ctx context.Context) error { return call(s.options.Plugins, ctx, sb) })
	if err != nil {
		s.log(sb).Warn("an NRI plugin was not notified of what was done to a pod", "err", err)
	}
}

// Resources are a pod's, in protobuf's JSON. The kubelet sets them on the pod's cgroup; we record them.
type Resources struct {
	Overhead  json.RawMessage `json:"overhead,omitempty"`
	Resources json.RawMessage `json:"resources,omitempty"`
}

// UpdateResources records what the kubelet set on the pod's cgroup; nil changes nothing.
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
	// Without the sandbox's lock, a plugin that hangs does not delay the pod's end.
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

// Resources returns those of the last update, or those that the pod was made with.
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
