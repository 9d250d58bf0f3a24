package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
)

// Open restores the sandboxes of an earlier daemon from their records and from
// what the kernel has, and then serves. Nothing that a single sandbox does or
// lacks stops it: what cannot be read is set aside, and what was half made is
// taken back in the background.
func Open(ctx context.Context, options Options) (*Store, error) {
	s := &Store{options: options, byID: make(map[string]*Sandbox), byName: make(map[string]*Sandbox)}
	s.base, s.cancel = context.WithCancelCause(ctx)
	if err := s.openFiles(); err != nil {
		return nil, err
	}
	halfMade, err := s.restore()
	if err != nil {
		return nil, err
	}
	s.reserveLevels()
	options.Networks.ReleaseUnknown(s.exists)
	s.releaseLost()
	s.work.Go(func() { s.takeBack(halfMade) })
	return s, nil
}

func (s *Store) openFiles() (err error) {
	if s.bootID, err = process.BootID(); err != nil {
		return err
	}
	if s.records, err = state.Open[Record](filepath.Join(s.options.Root, "sandboxes"), recordVersion, true); err != nil {
		return err
	}
	if err := s.readBootMarker(); err != nil {
		return err
	}
	if s.facts, err = state.Open[Facts](filepath.Join(s.options.State, "facts"), factsVersion, false); err != nil {
		return err
	}
	if err := s.makeDirectories(); err != nil {
		return err
	}
	return s.installPause()
}

// makeDirectories makes those that all sandboxes share, so that none of them
// leaves a directory behind.
func (s *Store) makeDirectories() error {
	for _, dir := range []string{s.Dir(""), s.runtimeRoot()} {
		// Processes of user namespaces have to get through.
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return err
		}
	}
	return nil
}

// readBootMarker finds out whether the machine has booted since the last
// daemon ran: then the volatile directory is empty, or of another boot.
func (s *Store) readBootMarker() error {
	path := filepath.Join(s.options.State, "boot-id")
	marker, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.rebooted = string(marker) != s.bootID
	if !s.rebooted {
		return nil
	}
	return state.WriteFile(path, []byte(s.bootID), false)
}

// restore brings every record back as a sandbox, and returns those that were
// half made when the daemon ended.
func (s *Store) restore() (halfMade []*Sandbox, err error) {
	records, bad, err := s.records.Load()
	if err != nil {
		return nil, err
	}
	facts, badFacts, err := s.facts.Load()
	if err != nil {
		return nil, err
	}
	for _, b := range append(bad, badFacts...) {
		s.options.Logger.Error("record set aside", "sandbox", b.ID, "file", b.Path, "err", b.Reason)
	}
	for id, record := range records {
		if record.ID != id {
			s.setAside(id, fmt.Errorf("it is a copy of the record of sandbox %q", record.ID))
			delete(records, id)
		}
	}
	for _, record := range newestFirst(records) {
		if err := s.restoreOne(record, facts[record.ID]); err != nil {
			s.setAside(record.ID, err)
		}
	}
	s.forgetFactsOfNobody(facts)
	for _, sb := range s.all(func(*Sandbox) bool { return true }) {
		close(sb.built)
		if sb.listed.Load() {
			s.restorePause(sb)
		} else {
			halfMade = append(halfMade, sb)
		}
	}
	return halfMade, nil
}

func (s *Store) setAside(id string, reason error) {
	b := s.records.SetAside(id, reason)
	s.options.Logger.Error("record set aside", "sandbox", b.ID, "file", b.Path, "err", b.Reason)
}

// forgetFactsOfNobody removes the facts of sandboxes that have no record.
func (s *Store) forgetFactsOfNobody(facts map[string]Facts) {
	for id := range facts {
		if s.exists(id) {
			continue
		}
		if err := s.facts.Remove(id); err != nil {
			s.options.Logger.Error("facts without a record stay", "sandbox", id, "err", err)
		}
	}
}

// newestFirst: where two records have one name, the newer one keeps it.
func newestFirst(records map[string]Record) []Record {
	list := make([]Record, 0, len(records))
	for _, record := range records {
		list = append(list, record)
	}
	slices.SortFunc(list, func(a, b Record) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) })
	return list
}

// restoreOne brings one sandbox back: as it was if the facts tell that Run or
// Stop had come to its end; as NotReady after a reboot, which ended all of
// them and took the facts along; and unlisted if Run was cut off.
func (s *Store) restoreOne(record Record, facts Facts) error {
	config, err := record.decodeConfig()
	if err != nil {
		return err
	}
	if record.CreatedAt <= 0 {
		return fmt.Errorf("the record says created at %d", record.CreatedAt)
	}
	sb := newSandbox(record, config)
	switch {
	case s.rebooted || facts.BootID != "" && facts.BootID != s.bootID:
		sb.facts.Store(&Facts{ExitedAt: time.Now()})
		sb.listed.Store(true)
	case facts.BootID != "":
		sb.timeline, facts.Timeline = step.NewTimeline(facts.Timeline), nil
		sb.facts.Store(&facts)
		sb.listed.Store(true)
	}
	s.lastCreated = max(s.lastCreated, record.CreatedAt)
	return s.claim(sb)
}

// claim gives a restored sandbox its id and, if it is listed, its name. A
// half-made one has no claim: its name was free at once for what came next.
func (s *Store) claim(sb *Sandbox) error {
	name := nameOf(sb.config.GetMetadata())
	if other := s.byName[name]; other != nil && sb.listed.Load() {
		return fmt.Errorf("sandbox %s, which is newer, has the same name %s", other.ID, name)
	}
	if sb.listed.Load() {
		s.byName[name] = sb
	}
	s.byID[sb.ID] = sb
	return nil
}

// restorePause finds the pause process of a sandbox again.
func (s *Store) restorePause(sb *Sandbox) {
	if !sb.Ready() {
		return
	}
	pause, err := process.Open(sb.Facts().Pause)
	if err != nil {
		if !errors.Is(err, process.ErrGone) {
			s.options.Logger.Error("the pause process cannot be watched", "sandbox", sb.ID, "err", err)
		}
		sb.update(func(f *Facts) { f.ExitedAt = time.Now() })
		return
	}
	sb.pause = pause
	s.watch(sb)
}

// releaseLost frees the addresses of sandboxes that do not run and have no
// namespace any more, which is what a reboot leaves: DEL runs for them in the
// background, with an empty CNI_NETNS.
func (s *Store) releaseLost() {
	for _, sb := range s.List() {
		if !sb.Ready() && !sb.hostNetwork() && !s.options.Netns.Alive(sb.ID) {
			s.options.Networks.Release(sb.ID)
		}
	}
}

// takeBack destroys half-made sandboxes, several at a time, each with a limit
// of its own. One that cannot be taken back is listed then, as NotReady, so
// that somebody can try again.
func (s *Store) takeBack(halfMade []*Sandbox) {
	const atOnce = 8
	slots := make(chan struct{}, atOnce)
	var wait sync.WaitGroup
	for _, sb := range halfMade {
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			s.takeBackOne(sb)
		})
	}
	wait.Wait()
	s.sweep()
}

// errCutOff is why a half-made sandbox could not be made.
var errCutOff = errors.New("the daemon ended while the sandbox was being made")

func (s *Store) takeBackOne(sb *Sandbox) {
	ctx, cancel := s.bound(s.base, s.options.Limits.Destroy)
	defer cancel()
	sb.failure = errCutOff
	if sb.lock.Lock(s.base) != nil {
		return
	}
	defer sb.lock.Unlock()
	s.options.Logger.Info("take back a sandbox that was half made", "sandbox", sb.ID)
	if err := s.destroy(ctx, sb, leaveToJournal); err != nil {
		s.options.Logger.Error("a half-made sandbox could not be taken back: stop and remove it", "sandbox", sb.ID, "err", err)
		sb.listed.Store(true)
	}
}
