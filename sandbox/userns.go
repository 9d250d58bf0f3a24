package sandbox

import (
	"context"
	"errors"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/oci"
)

// holder is the process that holds a new user namespace, if there is one.
type holder struct{ *namespace.Holder }

func (h *holder) running() bool { return h.Holder != nil }

func (h *holder) end() error {
	ending := h.Holder
	h.Holder = nil
	return ending.End()
}

// makeUserns makes the pod's user namespace and, by the same clone(2), the
// network namespace that it owns; the step netns pins that one.
func (c *creation) makeUserns(context.Context) error {
	userns := oci.UserNamespace(c.config)
	held, err := namespace.StartHolder(c.owner.pauseProgram(), idMappings(userns.GetUids()), idMappings(userns.GetGids()))
	if err != nil {
		return err
	}
	c.holder.Holder = held
	err = held.Pin(c.owner.options.Userns, c.ID, "user")
	if err == nil && !c.hostNetwork() {
		return nil
	}
	return errors.Join(err, c.holder.end())
}

func idMappings(from []*runtimeapi.IDMapping) []namespace.IDMapping {
	var to []namespace.IDMapping
	for _, m := range from {
		to = append(to, namespace.IDMapping{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Length: m.GetLength()})
	}
	return to
}
