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

func (s *Supervisor) setMade(c *container) {
	s.mu.Lock()
	c.made = true
	s.mu.Unlock()
}

// kill signals a container. SIGKILL ends a creation that is under way.
func (s *Supervisor) kill(id string, sig syscall.Signal, all bool) error {
	c, err := s.find(id)
	switch {
	case err == nil:
		return c.kill(sig, all)
	case errdefs.IsFailedPrecondition(err) && sig == syscall.SIGKILL:
		s.abort(id)
		return nil
	default:
		return err
	}
}

// end kills a container, also one that is being made, and waits until it has
// ended.
func (s *Supervisor) end(id string) error {
	for deadline := time.Now().Add(killTimeout); ; time.Sleep(abortInterval) {
		c, err := s.find(id)
		if err == nil {
			return c.end()
		}
		if !errdefs.IsFailedPrecondition(err) || time.Now().After(deadline) {
			return err
		}
		s.abort(id)
	}
}

// abortInterval is between two looks at a creation that is being aborted.
const abortInterval = 5 * time.Millisecond

func (s *Supervisor) forget(id string) {
	s.mu.Lock()
	delete(s.containers, id)
	s.mu.Unlock()
}

// find returns a container that is made, for a call to be done with it: its end is seen
// from then on.
func (s *Supervisor) find(id string) (*container, error) {
	c, err := s.lookUp(id)
	if err == nil {
		c.watchAdopted()
	}
	return c, err
}

// lookUp returns a container that is made. One that is being made, which a hook
// can make long, has nothing yet that could be used.
func (s *Supervisor) lookUp(id string) (*container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.containers[id]; c != nil {
		if !c.made {
			return nil, fmt.Errorf("container %s is being created: %w", id, errdefs.ErrFailedPrecondition)
		}
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

// abort ends the creation of a container.
func (s *Supervisor) abort(id string) {
	s.mu.Lock()
	c := s.containers[id]
	s.mu.Unlock()
	if c != nil { // else it has failed meanwhile
		c.abandon()
	}
}
