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
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
)

// Open restores the sandboxes of an earlier daemon from their records and from
// what the kernel has, and then serves. Nothing that a single sandbox does or
// lacks stops it: what cannot be read is left alone, and what was partially
// created is rolled back in the background.
func Open(ctx context.Context, options Options) (*Store, error) {
	s := &Store{options: options, byID: make(map[string]*Sandbox), byName: make(map[string]*Sandbox), rolledBack: make(chan struct{}), proof: make(chan struct{})}
	s.limits.Store(&options.Limits)
	s.base, s.cancel = context.WithCancelCause(ctx)
	if err := s.openFiles(); err != nil {
		return nil, err
	}
	partial, err := s.restore()
	if err != nil {
		return nil, err
	}
	s.reserveLevels()
	if err := s.writeBootMarker(); err != nil {
		return nil, err
	}
	options.Networks.ReleaseUnknown(s.Explains)
	s.releaseLost()
	s.work.Go(func() { s.rollBack(partial) })
	return s, nil
}

func (s *Store) openFiles() (err error) {
	if s.bootID, err = process.BootID(); err != nil {
		return err
	}
	if s.records, err = state.Open[Record](filepath.Join(s.options.Root, "sandboxes"), recordVersion, true); err != nil {
		return err
	}
	s.records.WrittenBy(s.options.Version)
	if err := s.readBootMarker(); err != nil {
		return err
	}
	if s.facts, err = state.Open[Facts](filepath.Join(s.options.State, "facts"), factsVersion, false); err != nil {
		return err
	}
	s.facts.WrittenBy(s.options.Version)
	s.files = state.Group(s.records, s.facts, "sandbox", s.options.Logger)
	if err := s.makeDirectories(); err != nil {
		return err
	}
	return s.installPause()
}

// makeDirectories makes those that all sandboxes share, so that none of them
// leaves a directory behind.
func (s *Store) makeDirectories() error {
	return os.MkdirAll(s.Dir(""), 0o711) // processes of user namespaces have to get through
}

// readBootMarker finds out whether the machine has booted since the last
// daemon ran: then the volatile directory is empty, or of another boot.
func (s *Store) readBootMarker() error {
	marker, err := state.ReadFile(s.bootMarker())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.rebooted = string(marker) != s.bootID
	return nil
}

func (s *Store) bootMarker() string { return filepath.Join(s.options.State, "boot-id") }

// writeBootMarker is called when what the reboot has ended is on disk: a daemon
// that is killed before is followed by one that finds the reboot again.
func (s *Store) writeBootMarker() error {
	if !s.rebooted || s.unrecorded {
		return nil
	}
	return state.WriteFile(s.bootMarker(), []byte(s.bootID), false)
}

// restore brings every record back as a sandbox, and returns those that were
// partially created when the daemon ended.
func (s *Store) restore() (partial []*Sandbox, err error) {
	records, facts, lost, err := s.files.Load(func(r Record) string { return r.ID })
	if err != nil {
		return nil, err
	}
	for _, record := range slices.SortedFunc(maps.Values(records), newestFirst) {
		if err := s.restoreOne(record, facts[record.ID], slices.Contains(lost, record.ID)); err != nil {
			s.files.Quarantine(record.ID, err)
		}
	}
	s.removeOrphanedFacts(facts)
	for _, sb := range s.all(func(*Sandbox) bool { return true }) {
		close(sb.built)
		if sb.listed.Load() {
			s.restorePause(sb)
		} else {
			partial = append(partial, sb)
		}
	}
	return partial, nil
}

// removeOrphanedFacts removes the facts of sandboxes that have no record.
func (s *Store) removeOrphanedFacts(facts map[string]Facts) {
	for id := range facts {
		if s.Explains(id) {
			continue
		}
		if err := s.facts.Remove(id); err != nil {
			s.options.Logger.Error("facts without a record stay", "sandbox", id, "err", err)
		}
	}
}

// newestFirst is the order of records: where two have one name, the newer one keeps it.
func newestFirst(a, b Record) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) }

// restoreOne brings one sandbox back: as it was if the facts are of this boot,
// and so Run had come to its end; as NotReady if it has ended with a reboot, or
// its facts are lost; and unlisted if Run was cut off. Facts that cannot be read
// stay what they are: a later daemon may be able to.
func (s *Store) restoreOne(record Record, facts Facts, lost bool) error {
	config, err := record.decodeConfig()
	if err != nil {
		return err
	}
	if record.CreatedAt <= 0 {
		return fmt.Errorf("the record says created at %d", record.CreatedAt)
	}
	sb := newSandbox(record, config)
	sb.timeline, facts.Timeline = step.NewTimeline(facts.Timeline), nil
	ended := s.rebooted || facts.BootID != "" || lost
	switch {
	case facts.BootID == s.bootID:
		sb.facts.Store(&facts)
		sb.listed.Store(true)
		sb.announced, sb.stopAnnounced = true, !facts.StoppedAt.IsZero()
	case lost && s.hasFacts(record.ID):
		sb.facts.Store(&Facts{BootID: s.bootID, ExitedAt: time.Now()})
		sb.listed.Store(true)
		sb.announced = true
	case ended || s.pauseRuns(sb):
		s.restoreEnded(sb)
	}
	s.lastCreated = max(s.lastCreated, record.CreatedAt)
	if err := s.options.Node.Know(cgroup.Path(record.CgroupsPath)); err != nil {
		s.log(sb).Error("the cgroup parent of a sandbox is not on disk: minicri check may miss its cgroups", "err", err)
	}
	return s.claim(sb)
}

// hasFacts reports whether there is something where the facts of a sandbox are.
func (s *Store) hasFacts(id string) bool {
	_, err := os.Lstat(s.facts.Path(id))
	return !errors.Is(err, fs.ErrNotExist)
}

// restoreEnded lists a sandbox as NotReady, and writes that down for the daemons
// that come next: to them the reboot is long ago.
func (s *Store) restoreEnded(sb *Sandbox) {
	sb.facts.Store(&Facts{BootID: s.bootID, ExitedAt: time.Now()})
	sb.listed.Store(true)
	sb.announced = true
	if err := s.writeFacts(sb); err != nil {
		s.unrecorded = true
		s.log(sb).Error("the end of a sandbox is not on disk; a restart notices it again", "err", err)
	}
}

// pauseRuns reports whether a sandbox without facts has its pause, past the exec
// barrier: then it was Ready, and its facts were lost.
func (s *Store) pauseRuns(sb *Sandbox) bool {
	pids, err := s.options.Hierarchies.Processes(cgroup.Path(sb.CgroupsPath))
	if err != nil {
		s.log(sb).Error("look for pause", "err", err)
		return true // touch nothing
	}
	return slices.ContainsFunc(pids, func(pid int) bool {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil {
			return !errors.Is(err, fs.ErrNotExist) // it may be
		}
		return filepath.Base(exe) == filepath.Base(oci.PauseProgram)
	})
}

// claim gives a restored sandbox its id and, if it is listed, its name. A
// partially created one has no claim: its name was free at once for the next one.
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
	switch {
	case err == nil:
		sb.pause = pause
		s.watch(sb)
	case errors.Is(err, process.ErrGone):
		sb.update(func(f *Facts) { f.ExitedAt = time.Now() })
	default:
		s.log(sb).Error("whether pause runs cannot be known: the sandbox stays Ready, and it is tried again", "err", err)
		s.work.Go(func() { s.restorePauseLater(sb) })
	}
}

// restorePauseRetry is the delay before restorePause is tried again.
const restorePauseRetry = time.Second

func (s *Store) restorePauseLater(sb *Sandbox) {
	select {
	case <-s.base.Done():
		return
	case <-time.After(restorePauseRetry):
	}
	if sb.lock.Lock(s.base) != nil {
		return
	}
	defer sb.lock.Unlock()
	if s.Exists(sb.ID) {
		s.restorePause(sb)
	}
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

// rollBack destroys partially created sandboxes, several at a time, each with a
// limit of its own. One that cannot be destroyed is listed then, as NotReady, so
// that its removal can be retried.
func (s *Store) rollBack(partial []*Sandbox) {
	const atOnce = 8
	slots := make(chan struct{}, atOnce)
	var wait sync.WaitGroup
	for _, sb := range partial {
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			s.rollBackOne(sb)
		})
	}
	wait.Wait()
	close(s.rolledBack)
}

// RolledBack is closed when every partially created sandbox is destroyed, or is
// listed because it could not be.
func (s *Store) RolledBack() <-chan struct{} { return s.rolledBack }

// errCutOff is why a sandbox was not made.
var errCutOff = errors.New("the daemon ended while the sandbox was being made")

func (s *Store) rollBackOne(sb *Sandbox) {
	ctx, cancel := s.bound(s.base, s.limits.Load().Destroy)
	defer cancel()
	sb.failure = errCutOff
	if sb.lock.Lock(s.base) != nil {
		return
	}
	defer sb.lock.Unlock()
	s.log(sb).Info("roll back a sandbox that was partially created")
	if err := s.destroy(ctx, sb, leaveToJournal); err != nil {
		s.log(sb).Error("a partially created sandbox could not be rolled back: stop and remove it", "err", err)
		s.listPartial(sb)
	}
}

// listPartial lists a sandbox that could not be destroyed, with its name unless
// that has been given to another one.
func (s *Store) listPartial(sb *Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name := nameOf(sb.config.GetMetadata()); s.byName[name] == nil {
		s.byName[name] = sb
	}
	sb.listed.Store(true)
}

// watch notices when pause ends. The goroutine ends when pause does, or when
// its handle is closed: by destroy, or by Close.
func (s *Store) watch(sb *Sandbox) {
	pause := sb.pause
	s.work.Go(func() {
		// Closing is what makes Wait return; destroy may have done it already.
		stop := context.AfterFunc(s.base, func() { _ = pause.Close() })
		defer stop()
		if err := pause.Wait(); err != nil {
			return
		}
		pause.Reap()
		s.noteExit(sb)
	})
}

func (s *Store) noteExit(sb *Sandbox) {
	if sb.lock.Lock(s.base) != nil {
		return
	}
	defer sb.lock.Unlock()
	if !sb.Ready() {
		return
	}
	s.log(sb).Warn("the pause process ended by itself: the sandbox is not ready any more")
	sb.update(func(f *Facts) { f.ExitedAt = time.Now() })
	if err := s.writeFacts(sb); err != nil {
		s.log(sb).Error("the end of pause is not on disk; a restart notices it again", "err", err)
	}
	s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
}
