package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/validate"
)

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
	err = s.askUpdate(ctx, sb, overhead, resources)
	if err == nil {
		err = s.recordResources(ctx, sb, overhead, resources)
	}
	if err != nil {
		return fmt.Errorf("update the resources of sandbox %s: %w", sb.ID, err)
	}
	s.notify(s.begin(ctx, sb), sb, stepNRIUpdated, Plugins.UpdatedPod)
	return nil
}

func (s *Store) recordResources(ctx context.Context, sb *Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error {
	unlock, err := sb.acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := s.Find(sb.ID); err != nil { // a Remove was faster
		return err
	}
	recorded, err := sb.Resources()
	if err != nil {
		return err
	}
	next, err := encodeResources(overhead, resources)
	if err != nil {
		return err
	}
	if overhead == nil {
		next.Overhead = recorded.Overhead
	}
	if resources == nil {
		next.Resources = recorded.Resources
	}
	sb.update(func(f *Facts) { f.Updated = next })
	return s.writeFacts(sb)
}

// Resources returns the resources of the pod: those of the last update, or those
// that it was made with.
func (sb *Sandbox) Resources() (*Resources, error) {
	if updated := sb.Facts().Updated; updated != nil {
		return updated, nil
	}
	linux := sb.config.GetLinux()
	return encodeResources(linux.GetOverhead(), linux.GetResources())
}

func encodeResources(overhead, resources *runtimeapi.LinuxContainerResources) (*Resources, error) {
	encoded := &Resources{}
	for to, from := range map[*json.RawMessage]*runtimeapi.LinuxContainerResources{
		&encoded.Overhead: overhead, &encoded.Resources: resources,
	} {
		if from == nil {
			continue
		}
		text, err := protojson.Marshal(from)
		if err != nil {
			return nil, fmt.Errorf("encode resources: %w", err)
		}
		*to = text
	}
	return encoded, nil
}
