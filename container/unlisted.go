package container

import (
	"context"
	"errors"
	"fmt"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
)

// noteUnlisted is for a container that its supervisor does not know. It has ended, or
// its supervisor could not read what its predecessor has left of it: then it runs, its
// state is Unknown until it ends, and all that can be done is to stop it. An error
// says that neither is known.
func (s *Store) noteUnlisted(c *Container) error {
	if c.Facts().FinishedAt != 0 {
		return nil
	}
	exit, err := s.options.Supervisors.ExitOf(c.group(), c.ID)
	if err != nil {
		return err
	}
	if exit != nil {
		s.noteEnded(c, exit)
		return nil
	}
	running, err := process.Open(c.Facts().Process)
	switch {
	case errors.Is(err, process.ErrGone):
		s.noteEnded(c, nil)
		return nil
	case err != nil:
		return fmt.Errorf("whether container %s runs: %w", c.ID, err)
	}
	s.change(c, func(f *Facts) { f.Unknown = true })
	if c.watched.Swap(true) {
		return running.Close()
	}
	s.options.Logger.Error("a container runs that its supervisor does not know: it is left alone, and can only be stopped", "container", c.ID, "pid", running.PID)
	s.work.Go(func() { s.watchUnlisted(c, running) })
	return nil
}

// watchUnlisted notices the end of a container, unless a supervisor does.
func (s *Store) watchUnlisted(c *Container, running *process.Process) {
	stop := context.AfterFunc(s.base, func() { _ = running.Close() })
	defer stop()
	if running.Wait() != nil {
		return
	}
	_ = running.Close()
	c.watched.Store(false)
	if !c.Facts().Unknown {
		return
	}
	if err := s.noteUnlisted(c); err != nil {
		s.options.Logger.Error("the end of a container cannot be noted; the next look does", "container", c.ID, "err", err)
	}
}

// killUnlisted ends a container that its supervisor does not know.
func (s *Store) killUnlisted(c *Container) error {
	if err := s.noteUnlisted(c); err != nil || c.Facts().FinishedAt != 0 {
		return err
	}
	limit := s.limits.Load().Kill
	err := s.options.Hierarchies.Remove(cgroup.Path(c.CgroupsPath), limit)
	running, openErr := process.Open(c.Facts().Process)
	if openErr == nil { // a privileged one may have moved to a cgroup outside
		err = errors.Join(err, running.Kill(limit), running.Close())
	} else if !errors.Is(openErr, process.ErrGone) {
		err = errors.Join(err, openErr)
	}
	if err != nil {
		return fmt.Errorf("end what its supervisor does not know: %w", err)
	}
	return s.noteUnlisted(c)
}
