package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
)

// Open restores the containers of an earlier daemon from their records and from
// what the shims tell. Nothing that a single container or shim does or lacks
// stops it. Sandboxes have to be open.
func Open(ctx context.Context, options Options) (*Store, error) {
	s := &Store{
		options: options, byID: make(map[string]*Container), byName: make(map[string]*Container), stopping: make(map[string]bool),
		shims: newShims(options.State, options.Shim, options.SystemdCgroup),
	}
	s.base, s.cancel = context.WithCancelCause(ctx)
	s.waits, s.cancelWaits = context.WithCancelCause(s.base)
	if err := s.openFiles(); err != nil {
		return nil, err
	}
	if err := s.restore(); err != nil {
		return nil, err
	}
	if err := s.findShims(); err != nil {
		return nil, err
	}
	s.work.Go(s.sweep)
	return s, nil
}

func (s *Store) openFiles() (err error) {
	if s.bootID, err = process.BootID(); err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(s.dir(""), 0o711), os.MkdirAll(s.volumes(""), 0o711), os.MkdirAll(s.shims.dir(""), 0o711)); err != nil {
		return err
	}
	if s.records, err = state.Open[Record](filepath.Join(s.options.Root, "containers"), recordVersion, true); err != nil {
		return err
	}
	s.facts, err = state.Open[Facts](filepath.Join(s.options.Root, "container-facts"), factsVersion, false)
	return err
}

// restore brings every record back. A container whose creation was cut off is
// not listed, and is destroyed by the sweep; so is one whose sandbox is gone.
func (s *Store) restore() error {
	records, bad, err := s.records.Load()
	if err != nil {
		return err
	}
	facts, badFacts, err := s.facts.Load()
	if err != nil {
		return err
	}
	for _, b := range append(bad, badFacts...) {
		s.options.Logger.Error("record set aside", "container", b.ID, "file", b.Path, "err", b.Reason)
	}
	for id, record := range records {
		if err := s.restoreOne(record, facts[id]); err != nil {
			b := s.records.SetAside(id, err)
			s.options.Logger.Error("record set aside", "container", id, "file", b.Path, "err", b.Reason)
		}
	}
	return nil
}

func (s *Store) restoreOne(record Record, facts Facts) error {
	config, err := record.decodeConfig()
	if err != nil {
		return err
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
		c.timeline, facts.Timeline = step.NewTimeline(facts.Timeline), nil
		c.facts.Store(&facts)
		c.listed.Store(true)
		s.byName[name] = c
	}
	s.byID[c.ID] = c
	return nil
}

// findShims connects to the shims of all pods that have containers, side by
// side, each within a limit of its own. Where none serves, another one is
// started if anything may still run; after a reboot nothing does.
func (s *Store) findShims() error {
	pods := make(map[string]bool)
	for _, c := range s.all(func(c *Container) bool { return c.Facts().Unknown }) {
		pods[c.SandboxID] = true
	}
	var wait sync.WaitGroup
	for sandboxID := range pods {
		wait.Go(func() { s.findShim(sandboxID) })
	}
	wait.Wait()
	return nil
}

func (s *Store) findShim(sandboxID string) {
	ctx, cancel := s.within(s.options.Limits.Kill)
	defer cancel()
	if s.ranBefore(sandboxID) {
		for _, c := range s.OfPod(sandboxID) {
			s.noteGone(c)
		}
		return
	}
	if err := s.lookAgain(ctx, sandboxID); err != nil {
		s.options.Logger.Error("the containers of a pod have no shim", "sandbox", sandboxID, "err", err)
	}
}

// ranBefore tells whether the pod's containers ran before the last boot.
func (s *Store) ranBefore(sandboxID string) bool {
	return !slices.ContainsFunc(s.OfPod(sandboxID), func(c *Container) bool { return c.Facts().BootID == s.bootID })
}

// sweep takes back what was half made, and what has no record any more.
func (s *Store) sweep() {
	ctx, cancel := s.within(s.options.Limits.Create)
	defer cancel()
	for _, c := range s.all(func(c *Container) bool { return !c.listed.Load() }) {
		s.takeBack(ctx, c)
	}
	s.sweepCgroups()
	s.sweepFiles(ctx)
	s.sweepShims(ctx)
}

// errCutOff is why a half-made container could not be made.
var errCutOff = errors.New("the daemon ended while the container was being made")

func (s *Store) takeBack(ctx context.Context, c *Container) {
	release, err := c.acquire(ctx)
	if err != nil {
		return
	}
	defer release()
	if c.listed.Load() || !s.exists(c.ID) {
		return // it was being made just now
	}
	s.options.Logger.Info("take back a container that was half made", "container", c.ID)
	if !c.Facts().Created {
		c.failure.Store(&errCutOff)
	}
	if err := s.destroy(ctx, c); err != nil {
		s.options.Logger.Error("a half-made container could not be taken back: remove it", "container", c.ID, "err", err)
		s.change(c, func(f *Facts) { takeExit(f, 0, false, false, 0) })
		s.listEnded(c)
	}
}

func (s *Store) sweepCgroups() {
	paths, err := s.options.Hierarchies.Find(s.options.Mark)
	if err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, path := range paths {
		id := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), s.options.Mark), ".scope")
		if !s.exists(id) {
			err := s.options.Hierarchies.Remove(path, s.options.Limits.Kill)
			s.options.Logger.Warn("removed what had no record", "kind", "cgroup", "name", path, "err", err)
		}
	}
}

func (s *Store) sweepFiles(ctx context.Context) {
	ids, err := readDirNames(s.dir(""))
	withVolumes, volumesErr := readDirNames(s.volumes(""))
	if err := errors.Join(err, volumesErr); err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, id := range append(ids, withVolumes...) {
		if !s.exists(id) {
			mounted, err := readDirNames(s.imagesDir(id))
			err = errors.Join(err, s.removeRootfs(ctx, id, mounted))
			s.options.Logger.Warn("removed what had no record", "kind", "files", "name", s.dir(id), "err", err)
		}
	}
}

// sweepShims ends the shims of pods that are gone.
func (s *Store) sweepShims(ctx context.Context) {
	pods, err := s.shims.known()
	if err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, sandboxID := range pods {
		if _, err := s.options.Sandboxes.Find(sandboxID); err == nil || len(s.OfPod(sandboxID)) > 0 {
			continue
		}
		if err := s.shims.forget(ctx, sandboxID); err != nil {
			s.options.Logger.Warn("a shim without containers", "sandbox", sandboxID, "err", err)
		}
	}
}
