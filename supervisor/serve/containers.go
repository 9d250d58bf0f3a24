package serve

import (
	"fmt"
	"syscall"
	"time"

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

// kill signals a container. SIGKILL ends a creation that is under way.
func (s *Supervisor) kill(id string, sig syscall.Signal, all bool) error {
	if c := s.get(id); c != nil && !isClosed(c.created) && sig == syscall.SIGKILL {
		c.abandon()
		return nil
	}
	c, err := s.find(id)
	if err != nil {
		return err
	}
	return c.kill(sig, all)
}

// end kills a container, also one that is being made, and waits until it has
// ended.
func (s *Supervisor) end(id string) error {
	if c := s.get(id); c != nil && !isClosed(c.created) {
		c.abandon()
		select {
		case <-c.created:
		case <-time.After(killTimeout):
		}
	}
	c, err := s.find(id)
	if err != nil {
		return err
	}
	return c.end()
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (s *Supervisor) forget(id string) {
	s.mu.Lock()
	delete(s.containers, id)
	s.mu.Unlock()
}

// find returns a container that is made, for a call to be done with it: its end is seen
// from then on. One that is being made, which a hook can make long, has nothing yet that
// could be used.
func (s *Supervisor) find(id string) (*container, error) {
	switch c := s.get(id); {
	case c == nil:
		return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	case !isClosed(c.created):
		return nil, fmt.Errorf("container %s is being created: %w", id, errdefs.ErrFailedPrecondition)
	default:
		c.watchAdopted()
		return c, nil
	}
}

func (s *Supervisor) get(id string) *container {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.containers[id]
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
