package server

import (
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

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
	labels := sb.Config().GetLabels()
	for key, value := range filter.GetLabelSelector() {
		if got, has := labels[key]; !has || got != value {
			return false
		}
	}
	return true
}
