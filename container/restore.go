package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
)

// Open restores the containers of an earlier daemon from their records and from
// what the supervisors report. No single container or supervisor makes it fail.
// Sandboxes have to be open.
func Open(ctx context.Context, options Options) (*Store, error) {
	s := &Store{
		options: options, byID: make(map[string]*Container), byName: make(map[string]*Container), byPod: make(map[string][]*Container),
		stopping: make(map[string]bool),
	}
	s.SetHandlerDefaults(options.HandlerDefaults)
	s.limits.Store(&options.Limits)
	s.base, s.cancel = context.WithCancelCause(ctx)
	options.Supervisors.Follow(s)
	s.waits, s.cancelWaits = context.WithCancelCause(s.base)
	if err := s.openFiles(); err != nil {
		return nil, err
	}
	if err := s.restore(); err != nil {
		return nil, err
	}
	s.findShims()
	s.work.Go(s.sweep)
	return s, nil
}

func (s *Store) openFiles() (err error) {
	if s.bootID, err = process.BootID(); err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(s.dir(""), 0o711), os.MkdirAll(s.volumes(""), 0o711)); err != nil {
		return err
	}
	if s.records, err = state.Open[Record](filepath.Join(s.options.Root, "containers"), recordVersion, true); err != nil {
		return err
	}
	if s.facts, err = state.Open[Facts](filepath.Join(s.options.Root, "container-facts"), factsVersion, false); err != nil {
		return err
	}
	s.records.WrittenBy(s.options.Version)
	s.facts.WrittenBy(s.options.Version)
	s.files = state.Group(s.records, s.facts, "container", s.options.Logger)
	return nil
}

// restore brings every record back. A container whose creation was cut off is
// not listed, and is destroyed by the sweep; so is one whose sandbox is gone.
func (s *Store) restore() error {
	records, facts, lost, err := s.files.Load(func(r Record) string { return r.ID })
	if err != nil {
		return err
	}
	for _, id := range lost {
		// It was made; its supervisor knows the rest.
		facts[id] = Facts{BootID: s.bootID, Created: true}
	}
	for id, record := range records {
		if err := s.restoreOne(record, facts[id]); err != nil {
			s.files.Quarantine(id, err)
		}
	}
	return nil
}

func (s *Store) restoreOne(record Record, facts Facts) error {
	config, err := record.decodeConfig()
	if err != nil {
		return err
	}
	if s.options.Sandboxes.LeftAlone(record.SandboxID) {
		s.files.LeaveAlone(record.ID)
		return nil
	}
	s.lastCreated = max(s.lastCreated, record.CreatedAt)
	c := newContainer(record, config)
	c.forgetEnvironment()
	_, err = s.options.Sandboxes.Find(record.SandboxID)
	if err == nil && facts.Created {
		name := nameOf(record.SandboxID, config.GetMetadata())
		if other := s.byName[name]; other != nil {
			return fmt.Errorf("container %s has the same name %s", other.ID, name)
		}
		facts.Unknown = facts.FinishedAt == 0 && facts.inShim()
		if facts.FinishedAt != 0 {
			close(c.ended)
		}
		c.announced.Store(true)
		c.stopAnnounced = facts.FinishedAt != 0
		c.timeline, facts.Timeline = step.NewTimeline(facts.Timeline), nil
		c.facts.Store(&facts)
		c.listed.Store(true)
		s.byName[name] = c
	}
	s.add(c)
	return nil
}

// findShims connects to the supervisors of all containers, side by side, each
// within a limit of its own, and does not wait for one that hangs. Where none
// serves, another one is started if anything may still run; after a reboot
// nothing does.
func (s *Store) findShims() {
	groups := make(map[string]bool)
	for _, c := range s.all(func(c *Container) bool { return c.Facts().Unknown }) {
		groups[c.group()] = true
	}
	var wait sync.WaitGroup
	for group := range groups {
		wait.Go(func() { s.findShim(group) })
	}
	found := make(chan struct{})
	s.work.Go(func() {
		wait.Wait()
		close(found)
	})
	select {
	case <-found:
	case <-time.After(s.limits.Load().Kill / findShare):
	}
}

// findShare is the part of the kill limit that the start of the daemon waits for
// supervisors: one that hangs holds up its own containers, whose state is
// unknown until its successor has adopted them.
const findShare = 5

func (s *Store) findShim(group string) {
	lives := false
	for _, c := range s.ofGroup(group) {
		if c.Facts().BootID == s.bootID {
			lives = true
		} else if c.Facts().inShim() {
			exit, err := s.options.Supervisors.ExitOf(c.group(), c.ID)
			if err != nil {
				s.log(c).Warn("how a container ended before the last boot is lost", "err", err)
			}
			s.noteEnded(c, exit)
		}
	}
	if !lives {
		return
	}
	s.lookUntilFound(group)
}

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
	s.log(c).Error("a container runs that its supervisor does not know: it is left alone, and can only be stopped", "pid", running.PID)
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
		s.log(c).Error("the end of a container cannot be noted; the next look does", "err", err)
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
