package server

import (
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/sandbox"
)

// podAndContainers is the status of a pod and of its containers at one moment,
// and a time, in nanoseconds since 1970, that is not after it.
func (r *Runtime) podAndContainers(sb *sandbox.Sandbox) (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus, int64) {
	at := time.Now().UnixNano()
	pod, containers := r.snapshot(sb)
	return pod, containers, at
}

// snapshot returns the statuses of a pod and its containers at one moment,
// without a lock: facts are replaced and never changed, so if the same ones are
// there before and after, nothing has changed in between.
func (r *Runtime) snapshot(sb *sandbox.Sandbox) (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
	for {
		before := r.factsOf(sb)
		pod := r.podStatus(sb)
		containers := []*runtimeapi.ContainerStatus{}
		for _, c := range r.Containers.ListPod(sb.ID) {
			containers = append(containers, containerStatus(c))
		}
		if slices.Equal(before, r.factsOf(sb)) {
			return pod, containers
		}
	}
}

// factsOf identifies the state of a pod: its facts, its containers, theirs.
func (r *Runtime) factsOf(sb *sandbox.Sandbox) []any {
	facts := []any{sb.Facts()}
	for _, c := range r.Containers.ListPod(sb.ID) {
		facts = append(facts, c, c.Facts())
	}
	return facts
}
