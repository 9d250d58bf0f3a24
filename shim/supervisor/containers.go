package supervisor

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// reserve makes a container known by its id.
func (s *Supervisor) reserve(c *container) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.containers[c.record.ID] != nil {
		return fmt.Errorf("create container %s: %w", c.record.ID, errdefs.ErrAlreadyExists)
	}
	s.containers[c.record.ID] = c
	return nil
}

func (s *Supervisor) forget(id string) {
	s.mu.Lock()
	delete(s.containers, id)
	s.mu.Unlock()
}

func (s *Supervisor) find(id string) (*container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.containers[id]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
}

func (s *Supervisor) all() []*container {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*container, 0, len(s.containers))
	for _, c := range s.containers {
		list = append(list, c)
	}
	return list
}
