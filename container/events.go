package container

import runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

// tell tells of an event; only of a container that is to be seen.
func (s *Store) tell(c *Container, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && c.listed.Load() {
		s.options.Events.ContainerEvent(c, kind)
	}
}

// tellChange tells what a change of facts means. A container may have started
// and ended in one change, when nobody was there to see it; one that could not
// be started has only ended.
func (s *Store) tellChange(c *Container, before, after *Facts) {
	if before.StartedAt == 0 && after.StartedAt != 0 && after.Reason != reasonStartError {
		s.tell(c, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	}
	if before.FinishedAt == 0 && after.FinishedAt != 0 {
		s.tell(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
}

// listEnded shows a container that has ended before anybody could see it.
func (s *Store) listEnded(c *Container) {
	c.listed.Store(true)
	s.tell(c, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	s.tell(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
}
