package container

import runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

// emit publishes an event of a listed container.
func (s *Store) emit(c *Container, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && c.listed.Load() {
		s.options.Events.ContainerEvent(c, kind)
	}
}

// emitChange emits the events of a change of facts. A container may have started and
// ended in one change, while no daemon ran; one that could not be started has only
// ended.
func (s *Store) emitChange(c *Container, before, after *Facts) {
	if before.StartedAt == 0 && after.StartedAt != 0 && after.Reason != reasonStartError {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	}
	if before.FinishedAt == 0 && after.FinishedAt != 0 {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
}

// listEnded lists a container that has ended before it was listed.
func (s *Store) listEnded(c *Container) {
	c.listed.Store(true)
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
}
