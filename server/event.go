package server

import (
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// GetContainerEvents sends what happens to pods and containers from now on,
// until the client goes. ResourceExhausted when the client does not keep up and
// has lost events.
func (r *Runtime) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	subscription := r.Events.Subscribe()
	defer subscription.Cancel()
	for {
		event, err := subscription.Next(stream.Context())
		if stream.Context().Err() != nil {
			return nil // the client has gone, which is how it ends
		}
		if err != nil {
			return err
		}
		if err := stream.Send(event); err != nil {
			return err
		}
	}
}

// SandboxEvent publishes what has happened to a sandbox, whose lock the caller
// holds. It implements sandbox.Events.
func (r *Runtime) SandboxEvent(sb *sandbox.Sandbox, kind runtimeapi.ContainerEventType) {
	r.Events.Publish(sb.ID, kind, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) { return r.look(sb) })
}

// ContainerEvent publishes what has happened to a container, whose lock the
// caller holds. It implements container.Events.
func (r *Runtime) ContainerEvent(c *container.Container, kind runtimeapi.ContainerEventType) {
	r.Events.Publish(c.ID, kind, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
		sb, err := r.Sandboxes.Find(c.SandboxID)
		if err != nil {
			return nil, nil // no container outlives its sandbox; this one is being taken back with it
		}
		return r.look(sb)
	})
}

// podAndContainers is the status of a pod and of its containers at one moment,
// and a time, in nanoseconds since 1970, that is not after it.
func (r *Runtime) podAndContainers(sb *sandbox.Sandbox) (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus, int64) {
	at := time.Now().UnixNano()
	pod, containers := r.look(sb)
	return pod, containers, at
}

// look takes the statuses of a pod and its containers as they are at one
// moment, without a lock: facts are replaced and never changed, so if the same
// ones are there before and after, nothing has changed between.
func (r *Runtime) look(sb *sandbox.Sandbox) (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
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
