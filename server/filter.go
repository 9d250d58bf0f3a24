package server

import (
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// matches: a nil filter takes all, and of a filter every field has to match.
// An id may be the start of one.
func matches(sb *sandbox.Sandbox, filter *runtimeapi.PodSandboxFilter) bool {
	if !strings.HasPrefix(sb.ID, filter.GetId()) {
		return false
	}
	if state := filter.GetState(); state != nil && state.GetState() != podState(sb) {
		return false
	}
	return hasLabels(sb.Config().GetLabels(), filter.GetLabelSelector())
}

// matchesContainer is the same for containers.
func matchesContainer(c *container.Container, filter *runtimeapi.ContainerFilter) bool {
	if !strings.HasPrefix(c.ID, filter.GetId()) || !strings.HasPrefix(c.SandboxID, filter.GetPodSandboxId()) {
		return false
	}
	if state := filter.GetState(); state != nil && state.GetState() != c.State() {
		return false
	}
	return hasLabels(c.Config().GetLabels(), filter.GetLabelSelector())
}

func hasLabels(labels, wanted map[string]string) bool {
	for key, value := range wanted {
		if got, has := labels[key]; !has || got != value {
			return false
		}
	}
	return true
}
