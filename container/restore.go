package container

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/supervisor/api"
)

// Open restores the containers of an earlier daemon from their records and from what supervisors
// report. No single container or supervisor makes it fail. Sandboxes must be open.
func Open(ctx context.Context, options Options) (*Store, error) {
	s := &Store{
		Store: object.NewStore[*Container](ctx, "container"), options: options, users: semaphore.NewWeighted(1),
	}
	s.SetHandlerDefaults(options.HandlerDefaults)
	options.Supervisors.Follow(s)
	var err error
	if s.bootID, err = process.BootID(); err != nil {
		return nil, err
	}
	if err := errors.Join(os.MkdirAll(s.dir(""), 0o711), os.MkdirAll(s.volumes(""), 0o711)); err != nil {
		return nil, err
	}
	s.files, err = state.OpenObjects[Record, Facts](ctx, "container", filepath.Join(options.Root, "containers"), filepath.Join(options.Root, "container-facts"), options.Version, options.Logger)
	if err != nil {
		return nil, err
	}
	if err := s.restore(); err != nil {
		return nil, err
	}
	s.findSupervisors()
	s.Go(s.sweep)
	return s, nil
}

// restore restores every record; what it does not list, as partial or without a sandbox, the sweep destroys.
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
	config, err := object.DecodeConfig(record.Config, &runtimeapi.ContainerConfig{})
	if err != nil {
		return err
	}
	if s.options.Sandboxes.LeftAlone(record.SandboxID) {
		s.files.LeaveAlone(record.ID)
		return nil
	}
	c := newContainer(record, config)
	c.forgetEnvironment()
	if _, err = s.options.Sandboxes.Find(record.SandboxID); err == nil && facts.Created {
		ended := facts.FinishedAt != 0
		if facts.Unknown = !ended && facts.supervised(); ended {
			close(c.ended)
		}
		c.announced.Store(true)
		c.stopAnnounced = ended
		rows := facts.Timeline
		facts.Timeline = nil
		c.Restore(facts, rows)
		c.Show()
	}
	return s.Add(c)
}

// findSupervisors connects to all supervisors in parallel, and waits for a part of the kill limit. One that
// hangs delays only its own containers, which are Unknown until a successor adopts them.
func (s *Store) findSupervisors() {
	groups := make(map[string]bool)
	for _, c := range s.All(func(c *Container) bool { return c.Facts().Unknown }) {
		groups[c.Supervisor] = true
	}
	var wait sync.WaitGroup
	for group := range groups {
		wait.Go(func() { s.findSupervisor(group) })
	}
	found := make(chan struct{})
	s.Go(func() {
		wait.Wait()
		close(found)
	})
	select {
	case <-found:
	case <-time.After(s.options.Sandboxes.Limits().Kill / 5):
	}
}

// findSupervisor starts a supervisor if anything may still run; nothing does after a reboot.
func (s *Store) findSupervisor(group string) {
	lives := false
	for _, c := range s.ofGroup(group) {
		if c.Facts().BootID == s.bootID {
			lives = true
		} else if c.Facts().supervised() {
			exit, err := s.options.Supervisors.ExitOf(c.Supervisor, c.ID)
			if err != nil {
				s.log(c).Warn("how a container ended before the last boot is lost", "err", err)
			}
			s.noteEnded(c, exit)
		}
	}
	if lives {
		s.lookUntilFound(group)
	}
}

// sweep rolls back what was partially created, and removes orphans once the sandboxes have done the same.
func (s *Store) sweep() {
	for _, c := range s.All(func(c *Container) bool { return !c.Listed() }) {
		s.rollBack(c)
	}
	select {
	case <-s.options.Sandboxes.RolledBack():
	case <-s.Base.Done():
		return
	}
	ctx, cancel := s.within(s.options.Sandboxes.Limits().Create)
	defer cancel()
	s.removeOrphans(ctx)
	keys, err := s.SnapshotsWithoutContainer(ctx)
	if err != nil {
		s.options.Logger.Error("not all snapshots were searched for orphans: the next start does it again", "err", err)
	}
	for _, key := range keys {
		s.noteRemoved("snapshot", key, s.options.Images.RemoveSnapshot(ctx, key))
	}
	s.reconcileAll(ctx)
}

// rollBack destroys a partial container, or else lists it as exited, so that its removal can be retried.
func (s *Store) rollBack(c *Container) {
	ctx, cancel := s.within(s.options.Sandboxes.Limits().Create)
	defer cancel()
	_ = s.underLock(ctx, c, func() error { // an error says that it is gone
		if c.Listed() {
			return nil // its creation has just ended
		}
		if started, err := s.restoreStarted(ctx, c); started || err != nil {
			if err != nil {
				s.log(c).Error("whether a container without facts runs cannot be known: the next start tries again", "err", err)
			}
			return nil
		}
		s.log(c).Info("roll back a container that was partially created")
		if !c.Facts().Created {
			c.Failure = errors.New("the daemon ended while the container was being made")
		}
		if err := s.destroy(ctx, c); err != nil {
			s.log(c).Error("a partially created container could not be rolled back: remove it", "err", err)
			s.change(c, func(f *Facts) { c.takeExit(f, 0, false, false, 0) })
			s.show(c)
		}
		return nil
	})
}

// restoreStarted lists a container without facts if its supervisor has started it: then it was made, and the
// facts are lost. An error says that the supervisor cannot be asked.
func (s *Store) restoreStarted(ctx context.Context, c *Container) (started bool, err error) {
	groups, err := s.options.Supervisors.Groups()
	if c.Facts().Created || err != nil || !slices.Contains(groups, c.Supervisor) || !s.options.Sandboxes.Exists(c.SandboxID) {
		return false, err
	}
	supervisor, err := s.options.Supervisors.Ensure(ctx, c.Supervisor)
	if err != nil {
		return false, err
	}
	known, err := supervisor.List(ctx)
	at := slices.IndexFunc(known, func(k *api.Container) bool { return k.GetId() == c.ID && k.GetStartedAt() != 0 })
	if err != nil || at < 0 || !s.TakeName(c) {
		return false, err
	}
	s.log(c).Error("the facts of a container are lost; it is what its supervisor knows of it")
	s.change(c, func(f *Facts) {
		f.BootID, f.Created = s.bootID, true
		f.Process = process.Facts{PID: int(known[at].GetPid()), StartTime: known[at].GetStartTime()}
	})
	c.announced.Store(true)
	c.Show()
	s.note(known[at])
	return true, nil
}

// removeOrphans removes what has no record, through the image store if that holds it.
func (s *Store) removeOrphans(ctx context.Context) {
	owners := s.options.Sandboxes.Owners()
	owners.Container = s.explains
	orphans, err := s.options.Places.Find(owners)
	if err != nil {
		s.options.Logger.Error("not all places were searched for orphans: the next start does it again", "err", err)
	}
	for _, o := range orphans {
		if o.Kind == sweep.ContainerFiles || o.Kind == sweep.Volumes {
			err = s.removeRootfs(ctx, o.ID, 0) // the sweep of snapshots removes those of images
		} else {
			err = s.options.Places.Remove(o)
		}
		s.noteRemoved(string(o.Kind), o.Path, err)
	}
}

func (s *Store) noteRemoved(kind, name string, err error) {
	if err != nil {
		s.options.Logger.Error("an orphan could not be removed; the next start retries", "kind", kind, "name", name, "err", err)
		return
	}
	s.options.Logger.Warn("removed an orphan: it had no record", "kind", kind, "name", name)
}

// reconcileAll has supervisors delete what has no record, and ends older ones that have nothing left.
func (s *Store) reconcileAll(ctx context.Context) {
	groups, err := s.options.Supervisors.Groups()
	for _, group := range groups {
		if known := s.options.Supervisors.Known(group); known != nil {
			s.options.Logger.Error("pods of another build are left alone", "supervisor", group, "err", known)
			continue
		}
		if !s.options.Supervisors.Ended(group) {
			err = errors.Join(err, s.look(ctx, group))
		}
		err = errors.Join(err, s.options.Supervisors.End(ctx, group))
	}
	if err != nil {
		s.options.Logger.Warn("a supervisor may hold orphans: the next start removes them", "err", err)
	}
}

// SnapshotsWithoutContainer returns keys of snapshots without a container, whose id a key begins with. Records are
// written before snapshots are made, so it lists the snapshots first.
func (s *Store) SnapshotsWithoutContainer(ctx context.Context) ([]string, error) {
	keys, err := s.options.Images.Snapshots(ctx)
	orphans := []string{}
	for _, key := range keys {
		if !s.explains(key[:min(64, len(key))]) {
			orphans = append(orphans, key)
		}
	}
	return orphans, err
}
