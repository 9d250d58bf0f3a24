package container

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/supervisor/api"
)

// sweep is the last part of a start: it rolls back the containers that were
// partially created, and removes the orphans of containers and of pods when the
// sandboxes have rolled back theirs.
func (s *Store) sweep() {
	for _, c := range s.all(func(c *Container) bool { return !c.listed.Load() }) {
		s.rollBack(c)
	}
	select {
	case <-s.options.Sandboxes.RolledBack():
	case <-s.base.Done():
		return
	}
	ctx, cancel := s.within(s.limits.Load().Create)
	defer cancel()
	s.removeOrphans(ctx)
	s.sweepSnapshots(ctx)
	s.reconcileAll(ctx)
}

// errCutOff is why a container was not made.
var errCutOff = errors.New("the daemon ended while the container was being made")

// rollBack destroys a container whose creation was cut off. One that cannot be
// destroyed is listed as exited, so that its removal can be retried.
func (s *Store) rollBack(c *Container) {
	ctx, cancel := s.within(s.limits.Load().Create)
	defer cancel()
	unlock, err := c.acquire(ctx)
	if err != nil {
		return
	}
	defer unlock()
	if c.listed.Load() || !s.exists(c.ID) {
		return // it was being made just now
	}
	if s.restoreStarted(ctx, c) {
		return
	}
	s.log(c).Info("roll back a container that was partially created")
	if !c.Facts().Created {
		c.failure.Store(&errCutOff)
	}
	if err := s.destroy(ctx, c); err != nil {
		s.log(c).Error("a partially created container could not be rolled back: remove it", "err", err)
		s.change(c, func(f *Facts) { c.takeExit(f, 0, false, false, 0) })
		s.listEnded(c)
	}
}

// restoreStarted lists a container without facts if its supervisor has started it,
// which it does for containers only that were made: the facts are lost, and it may
// run. It reports whether it did.
func (s *Store) restoreStarted(ctx context.Context, c *Container) bool {
	groups, err := s.options.Supervisors.Groups()
	if c.Facts().Created || err != nil || !slices.Contains(groups, c.group()) || !s.options.Sandboxes.Exists(c.SandboxID) {
		return false
	}
	supervisor, err := s.shimOf(ctx, c.group())
	if err != nil {
		return false
	}
	known, err := supervisor.List(ctx)
	at := slices.IndexFunc(known, func(k *api.Container) bool { return k.GetId() == c.ID && k.GetStartedAt() != 0 })
	if err != nil || at < 0 || !s.takeName(c) {
		return false
	}
	s.log(c).Error("the facts of a container are lost; it is what its supervisor knows of it")
	s.change(c, func(f *Facts) { f.BootID, f.Created = s.bootID, true })
	c.announced.Store(true)
	c.listed.Store(true)
	s.note(known[at])
	return true
}

// takeName gives a container its name unless another one has it by now.
func (s *Store) takeName(c *Container) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := nameOf(c.SandboxID, c.Config().GetMetadata())
	if s.byName[name] != nil {
		return false
	}
	s.byName[name] = c
	return true
}

// removeOrphans removes what has no record. What a supervisor or the image store
// holds is removed through them.
func (s *Store) removeOrphans(ctx context.Context) {
	owners := s.options.Sandboxes.Owners()
	owners.Container = s.explains
	orphans, err := s.options.Places.Find(owners)
	if err != nil {
		s.options.Logger.Error("not all places were searched for orphans: the next start does it again", "err", err)
	}
	for _, o := range orphans {
		switch o.Kind {
		case sweep.ContainerFiles, sweep.Volumes:
			err = s.removeOrphanedRootfs(ctx, o.ID)
		default:
			err = s.options.Places.Remove(o)
		}
		s.noteRemoved(string(o.Kind), o.Path, err)
	}
}

func (s *Store) removeOrphanedRootfs(ctx context.Context, id string) error {
	images, err := os.ReadDir(s.imagesDir(id))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var numbers []string
	for _, entry := range images {
		numbers = append(numbers, entry.Name())
	}
	return s.removeRootfs(ctx, id, numbers)
}

// noteRemoved logs what became of an orphan.
func (s *Store) noteRemoved(kind, name string, err error) {
	if err != nil {
		s.options.Logger.Error("an orphan could not be removed; the next start retries", "kind", kind, "name", name, "err", err)
		return
	}
	s.options.Logger.Warn("removed an orphan: it had no record", "kind", kind, "name", name)
}

// reconcileAll has each supervisor delete the containers and pauses that have no record
// any more, and ends those of other builds that are left with none.
func (s *Store) reconcileAll(ctx context.Context) {
	groups, err := s.options.Supervisors.Groups()
	for _, group := range groups {
		if known := s.options.Supervisors.Known(group); known != nil {
			s.options.Logger.Error("pods of another build are left alone", "supervisor", group, "err", known)
			continue
		}
		if !s.options.Supervisors.Ended(group) {
			err = errors.Join(err, s.lookAgain(ctx, group))
		}
		err = errors.Join(err, s.options.Supervisors.End(ctx, group))
	}
	if err != nil {
		s.options.Logger.Warn("a supervisor may hold orphans: the next start removes them", "err", err)
	}
}

// idLength is that of the ids that image stores' keys begin with.
const idLength = 64

// OfSnapshot is the id of the container that a snapshot is of, by its key.
func OfSnapshot(key string) string { return key[:min(idLength, len(key))] }

// SnapshotsWithoutContainer are the keys of writable layers, and of mounted images,
// that no container explains. They are listed first, and the containers asked for
// then: a record is written before a layer is made.
func (s *Store) SnapshotsWithoutContainer(ctx context.Context) ([]string, error) {
	keys, err := s.options.Images.Snapshots(ctx)
	orphans := []string{}
	for _, key := range keys {
		if !s.explains(OfSnapshot(key)) {
			orphans = append(orphans, key)
		}
	}
	return orphans, err
}

// sweepSnapshots removes those that no container explains.
func (s *Store) sweepSnapshots(ctx context.Context) {
	keys, err := s.SnapshotsWithoutContainer(ctx)
	if err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, key := range keys {
		s.noteRemoved("snapshot", key, s.options.Images.RemoveSnapshot(ctx, key))
	}
}
