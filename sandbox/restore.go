package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
)

// Open restores the sandboxes of an earlier daemon from their records and from what the
// kernel has. No single sandbox stops it: what cannot be read is left alone, and what was
// partially created is rolled back in the background.
func Open(ctx context.Context, options Options) (*Store, error) {
	s := &Store{
		Store: object.NewStore[*Sandbox](ctx, "pod sandbox"), options: options,
		rolledBack: make(chan struct{}), proof: make(chan struct{}),
	}
	s.SetLimits(options.Limits)
	if err := s.openFiles(); err != nil {
		return nil, err
	}
	partial, err := s.restore()
	if err != nil {
		return nil, err
	}
	// Now what the reboot has ended is on disk: a daemon that is killed before is followed
	// by one that finds the reboot again.
	if err := state.WriteFile(s.bootMarker(), []byte(s.bootID), false); err != nil {
		return nil, err
	}
	options.Networks.ReleaseUnknown(s.Explains)
	// Those that do not run and have no namespace any more are what a reboot leaves: DEL
	// runs for them in the background, with an empty CNI_NETNS.
	for _, sb := range s.List() {
		if !sb.Ready() && !sb.hostNetwork() && !options.Netns.Alive(sb.ID) {
			options.Networks.Release(sb.ID)
		}
	}
	s.Go(func() { s.rollBack(partial) })
	return s, nil
}

func (s *Store) bootMarker() string { return filepath.Join(s.options.State, "boot-id") }

func (s *Store) openFiles() (err error) {
	if s.bootID, err = process.BootID(); err != nil {
		return err
	}
	o := s.options
	s.files, err = state.OpenObjects[Record, Facts]("sandbox", filepath.Join(o.Root, "sandboxes"), filepath.Join(o.State, "facts"), o.Version, o.Logger)
	if err != nil {
		return err
	}
	// Since a boot the volatile directory is empty, or of another boot.
	marker, err := state.ReadFile(s.bootMarker())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.rebooted = string(marker) != s.bootID
	// Shared by all sandboxes; processes of user namespaces have to get through.
	if err := os.MkdirAll(s.Dir(""), 0o711); err != nil {
		return err
	}
	return s.installPause()
}

// restore brings every record back as a sandbox, and returns those that were
// partially created when the daemon ended.
func (s *Store) restore() (partial []*Sandbox, err error) {
	records, facts, lost, err := s.files.Load(func(r Record) string { return r.ID })
	if err != nil {
		return nil, err
	}
	// Where two have one name, the newer one keeps it.
	newestFirst := func(a, b Record) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) }
	for _, record := range slices.SortedFunc(maps.Values(records), newestFirst) {
		if err := s.restoreOne(record, facts[record.ID], slices.Contains(lost, record.ID)); err != nil {
			s.files.Quarantine(record.ID, err)
		}
	}
	for id := range facts {
		if s.Explains(id) {
			continue
		}
		if err := s.files.Facts.Remove(id); err != nil {
			s.options.Logger.Error("facts without a record stay", "sandbox", id, "err", err)
		}
	}
	for _, sb := range s.All(func(*Sandbox) bool { return true }) {
		close(sb.built)
		s.options.Machine.ReserveLevel(s.labels(sb.ID).Process)
		if sb.Listed() {
			s.restorePause(sb)
		} else {
			partial = append(partial, sb)
		}
	}
	return partial, nil
}

// restoreOne brings one sandbox back: as it was if the facts are of this boot,
// and so Run had come to its end; as NotReady if it has ended with a reboot, or
// its facts are lost; and unlisted if Run was cut off.
func (s *Store) restoreOne(record Record, facts Facts, lost bool) error {
	config, err := record.decodeConfig()
	if err != nil {
		return err
	}
	if record.CreatedAt <= 0 {
		return fmt.Errorf("the record says created at %d", record.CreatedAt)
	}
	sb := newSandbox(record, config)
	ended := lost || facts.BootID != s.bootID && (s.rebooted || facts.BootID != "")
	rows := facts.Timeline
	facts.Timeline = nil
	if ended {
		facts = Facts{BootID: s.bootID, ExitedAt: time.Now()}
	}
	sb.Restore(facts, rows)
	if facts.BootID == s.bootID {
		sb.Show()
		sb.announced, sb.stopAnnounced = true, !facts.StoppedAt.IsZero()
	}
	if err := s.Add(sb); err != nil {
		return err
	}
	// For the daemons that come next: to them the reboot is long ago. What cannot be read now
	// stays what it is.
	if _, err := os.Lstat(s.files.Facts.Path(record.ID)); ended && (!lost || errors.Is(err, fs.ErrNotExist)) {
		if err := s.writeFacts(sb); err != nil {
			s.log(sb).Error("the end of a sandbox is not on disk", "err", err)
		}
	}
	if err := s.options.Node.Know(cgroup.Path(record.CgroupsPath)); err != nil {
		s.log(sb).Error("the cgroup parent of a sandbox is not on disk: minicri check may miss its cgroups", "err", err)
	}
	return nil
}

// restorePause finds the pause process of a sandbox again.
func (s *Store) restorePause(sb *Sandbox) {
	if !sb.Ready() {
		return
	}
	pause, err := process.Open(sb.Facts().Pause)
	switch {
	case err == nil:
		sb.pause = pause
		s.watch(sb)
	case errors.Is(err, process.ErrGone):
		sb.Update(func(f *Facts) { f.ExitedAt = time.Now() })
	default:
		s.log(sb).Error("whether pause runs cannot be known: the sandbox stays Ready, and its end is not noticed", "err", err)
	}
}

// rollBack destroys partially created sandboxes, several at a time, each with a
// limit of its own.
func (s *Store) rollBack(partial []*Sandbox) {
	defer close(s.rolledBack)
	var work errgroup.Group
	work.SetLimit(8)
	for _, sb := range partial {
		work.Go(func() error {
			s.rollBackOne(sb)
			return nil
		})
	}
	_ = work.Wait()
}

// RolledBack is closed when every partially created sandbox is destroyed, or is
// listed because it could not be.
func (s *Store) RolledBack() <-chan struct{} { return s.rolledBack }

// rollBackOne destroys one of them. One that cannot be destroyed is listed then, as
// NotReady, so that its removal can be retried.
func (s *Store) rollBackOne(sb *Sandbox) {
	ctx, cancel := s.bound(s.Base, s.Limits().Destroy)
	defer cancel()
	unlock, err := sb.Acquire(s.Base)
	if err != nil {
		return
	}
	defer unlock()
	sb.Failure = errors.New("the daemon ended while the sandbox was being made")
	s.log(sb).Info("roll back a sandbox that was partially created")
	if err := s.destroy(ctx, sb, leaveToJournal); err != nil {
		s.log(sb).Error("a partially created sandbox could not be rolled back: stop and remove it", "err", err)
		s.TakeName(sb) // unless another one has it by now
		sb.Show()
	}
}

// watch notices when pause ends. The goroutine ends when pause does, or when
// its handle is closed: by destroy, or by Close.
func (s *Store) watch(sb *Sandbox) {
	pause := sb.pause
	s.Go(func() {
		// Closing is what makes Wait return; destroy may have done it already.
		stop := context.AfterFunc(s.Base, func() { _ = pause.Close() })
		defer stop()
		if err := pause.Wait(); err != nil {
			return
		}
		pause.Reap()
		s.noteExit(sb)
	})
}

func (s *Store) noteExit(sb *Sandbox) {
	unlock, err := sb.Acquire(s.Base)
	if err != nil {
		return
	}
	defer unlock()
	if !sb.Ready() {
		return
	}
	s.log(sb).Warn("the pause process ended by itself: the sandbox is not ready any more")
	s.noteEnd(sb)
	if err := s.writeFacts(sb); err != nil {
		s.log(sb).Error("the end of pause is not on disk; a restart notices it again", "err", err)
	}
}
