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
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
)

// Open restores the sandboxes of an earlier daemon from their records and the kernel. No single one
// makes it fail: unreadable ones are left alone, partial ones are rolled back in the background.
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
	// Written after restore: if the daemon is killed before, the next one finds the reboot again.
	if s.rebooted && !s.unrecorded {
		if err := state.WriteFile(s.bootMarker(), []byte(s.bootID), false); err != nil {
			return nil, err
		}
	}
	options.Networks.ReleaseUnknown(s.Explains)
	// After a reboot there are no namespaces: DEL runs in the background, with an empty CNI_NETNS.
	for _, sb := range s.List() {
		if len(sb.Addresses()) > 0 {
			options.Networks.KnowAttached(sb.ID)
		}
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
	s.files, err = state.OpenObjects[Record, Facts](s.Base, "sandbox", filepath.Join(o.Root, "sandboxes"), filepath.Join(o.State, "facts"), o.Version, o.Logger)
	if err != nil {
		return err
	}
	// After a boot the volatile directory is empty, or of another boot.
	marker, err := state.ReadFile(s.bootMarker())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.rebooted = string(marker) != s.bootID
	// Processes of user namespaces have to get through.
	if err := os.MkdirAll(s.Dir(""), 0o711); err != nil {
		return err
	}
	return s.installPause()
}

// restore restores every record, and returns the sandboxes that were partially created.
func (s *Store) restore() (partial []*Sandbox, err error) {
	records, facts, lost, err := s.files.Load(func(r Record) string { return r.ID })
	if err != nil {
		return nil, err
	}
	// The newer one of two keeps their name.
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
		s.options.Machine.ReserveLevel(s.SELinux(sb.ID).Process)
		if sb.Listed() {
			s.restorePause(sb)
		} else {
			partial = append(partial, sb)
		}
	}
	return partial, nil
}

// restoreOne restores a sandbox: as it was if the facts are of this boot; as NotReady if a reboot ended it,
// or its facts are lost; unlisted if Run was cut off.
func (s *Store) restoreOne(record Record, facts Facts, lost bool) error {
	config, err := object.DecodeConfig(record.Config, &runtimeapi.PodSandboxConfig{})
	if err != nil {
		return err
	}
	if record.CreatedAt <= 0 {
		return fmt.Errorf("the record says created at %d", record.CreatedAt)
	}
	sb := newSandbox(record, config)
	ended := lost || facts.BootID != s.bootID && (s.rebooted || facts.BootID != "" || s.pauseRuns(record))
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
	// Written now: later daemons do not see this reboot. Unreadable facts stay as they are.
	if _, err := os.Lstat(s.files.Facts.Path(record.ID)); ended && (!lost || errors.Is(err, fs.ErrNotExist)) {
		if err := s.writeFacts(sb); err != nil {
			s.unrecorded = true
			s.log(sb).Error("the end of a sandbox is not on disk", "err", err)
		}
	}
	if err := s.options.Node.Know(cgroup.Path(record.CgroupsPath)); err != nil {
		s.log(sb).Error("the cgroup parent of a sandbox is not on disk: minicri check may miss its cgroups", "err", err)
	}
	return nil
}

// pauseRuns reports whether a sandbox without facts has its pause, past the exec barrier: then it was
// Ready, and its facts are lost.
func (s *Store) pauseRuns(record Record) bool {
	pids, err := s.options.Hierarchies.Processes(cgroup.Path(record.CgroupsPath))
	if err != nil {
		s.options.Logger.Error("whether pause runs cannot be known: the sandbox is not touched", "sandbox", record.ID, "err", err)
		return true // so nothing is touched
	}
	return slices.ContainsFunc(pids, func(pid int) bool {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil {
			return !errors.Is(err, fs.ErrNotExist) // it may be
		}
		exe = strings.TrimSuffix(exe, " (deleted)") // another build has replaced the file (proc_pid_exe(5))
		return filepath.Base(exe) == filepath.Base(oci.PauseProgram)
	})
}

func (s *Store) restorePause(sb *Sandbox) {
	if !sb.Ready() {
		return
	}
	pause, err := s.options.Kernel.OpenProcess(sb.Facts().Pause)
	switch {
	case err == nil:
		sb.pause = pause
		s.watch(sb)
	case errors.Is(err, process.ErrGone):
		s.noteExit(sb)
	default:
		s.log(sb).Error("whether pause runs cannot be known: the sandbox stays Ready, and it is tried again", "err", err)
		s.Go(func() { s.restorePauseLater(sb) })
	}
}

func (s *Store) restorePauseLater(sb *Sandbox) {
	const restorePauseRetry = time.Second // between two tries to open a pause
	select {
	case <-s.Base.Done():
	case <-time.After(restorePauseRetry):
	}
	if unlock, err := sb.Acquire(s.Base); err == nil {
		defer unlock()
		if s.Exists(sb.ID) {
			s.restorePause(sb)
		}
	}
}

// rollBack destroys partially created sandboxes, several at a time, each with its own limit.
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

// RolledBack is closed when each partially created sandbox is destroyed, or else listed.
func (s *Store) RolledBack() <-chan struct{} { return s.rolledBack }

// rollBackOne lists a sandbox that it cannot destroy as NotReady, so that its removal can be retried.
func (s *Store) rollBackOne(sb *Sandbox) {
	ctx, cancel := step.Bound(s.Base, s.Base, s.Limits().Destroy)
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

// watch notices the end of pause. Its goroutine ends then, or when destroy or Close closes the handle.
func (s *Store) watch(sb *Sandbox) {
	pause := sb.pause
	s.Go(func() {
		// Closing makes Wait return; destroy may have closed it already.
		stop := context.AfterFunc(s.Base, func() { _ = pause.Close() })
		defer stop()
		if err := pause.Wait(); err != nil {
			return
		}
		pause.Reap()
		if unlock, err := sb.Acquire(s.Base); err == nil {
			s.noteExit(sb)
			unlock()
		}
	})
}

// noteExit needs the sandbox's lock.
func (s *Store) noteExit(sb *Sandbox) {
	if !sb.Ready() {
		return
	}
	const ended = "the pause process ended by itself: the sandbox is not ready any more"
	s.log(sb).Warn(ended)
	sb.Rows.Add(step.Row{Kind: "pod", Step: "pause", Start: time.Now(), Error: ended})
	s.noteEnd(sb)
	if err := s.writeFacts(sb); err != nil {
		s.log(sb).Error("the end of pause is not on disk; a restart notices it again", "err", err)
	}
}
