package container

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// shimOf returns the connection to a group's supervisor, and starts one if none
// serves.
func (s *Store) shimOf(ctx context.Context, group string) (*client.Client, error) {
	return s.options.Supervisors.Ensure(ctx, group)
}

// Noted implements client.Follower: it updates the facts of containers with what
// their supervisor reports.
func (s *Store) Noted(event *api.Event) { s.note(event.GetContainer()) }

// Missed implements client.Follower.
func (s *Store) Missed(group string, supervisor *client.Client) {
	ctx, cancel := s.within(s.limits.Load().Create)
	defer cancel()
	if err := s.reconcile(ctx, group, supervisor); err != nil {
		s.options.Logger.Error("containers of a supervisor are not up to date: its events were missed and it does not list them", "supervisor", group, "err", err)
	}
}

// Lost implements client.Follower. A supervisor of another build ends with its last pod;
// otherwise another one adopts what still runs, and until then the states are Unknown.
func (s *Store) Lost(group string, lost error) {
	left := slices.DeleteFunc(s.ofGroup(group), func(c *Container) bool { f := c.Facts(); return !f.inShim() || f.FinishedAt != 0 })
	if len(left) == 0 && s.options.Supervisors.Ended(group) {
		return
	}
	for _, c := range left {
		s.change(c, func(f *Facts) { f.Unknown = f.FinishedAt == 0 })
	}
	if s.options.ObserveLost != nil {
		s.options.ObserveLost()
	}
	s.options.Logger.Warn("a supervisor is gone; another one adopts its containers", "supervisor", group, "containers", len(left), "err", lost)
	s.lookUntilFound(group)
}

// lookUntilFound is lookAgain until it succeeds, or the daemon ends.
func (s *Store) lookUntilFound(group string) {
	for s.base.Err() == nil {
		ctx, cancel := s.within(s.limits.Load().Create)
		err := s.lookAgain(ctx, group)
		cancel()
		if err == nil {
			return
		}
		if errors.Is(err, client.ErrUnknownBuild) {
			s.leaveAlone(group, err)
			return
		}
		s.options.Logger.Error("containers have no supervisor: its start is retried", "supervisor", group, "err", err)
	}
}

// leaveAlone takes the containers of a build that cannot be served for what their facts
// say.
func (s *Store) leaveAlone(group string, why error) {
	s.options.Logger.Error("containers of another build are left alone, and are listed as they were last known", "supervisor", group, "err", why)
	for _, c := range s.ofGroup(group) {
		s.change(c, func(f *Facts) { f.Unknown = false })
	}
}

// reconnectInterval is between two attempts to reach a supervisor that does not
// serve.
const reconnectInterval = 20 * time.Millisecond

// lookAgain finds out about the containers of a supervisor that has just been
// found, or lost; the one that adopts them may be lost as well.
func (s *Store) lookAgain(ctx context.Context, group string) error {
	for {
		supervisor, err := s.shimOf(ctx, group)
		if err == nil {
			err = s.reconcile(ctx, group, supervisor)
		}
		if err == nil || len(s.ofGroup(group)) == 0 && s.options.Supervisors.Ended(group) {
			return nil
		}
		if errors.Is(err, client.ErrUnknownBuild) {
			return err
		}
		select {
		case <-time.After(reconnectInterval):
		case <-ctx.Done():
			return err
		}
	}
}

// reconcile notes what the supervisor knows of its containers. What it does not
// know has left its exit on disk, or has never been made; what is being made
// just now is its maker's.
func (s *Store) reconcile(ctx context.Context, group string, supervisor *client.Client) error {
	made := slices.DeleteFunc(s.ofGroup(group), func(c *Container) bool { return !c.Facts().inShim() })
	list, err := supervisor.List(ctx)
	if err != nil {
		return err
	}
	known := make(map[string]bool)
	for _, reported := range list {
		known[reported.GetId()] = true
		s.note(reported)
		s.deleteOrphan(ctx, group, supervisor, reported.GetId())
	}
	for _, c := range made {
		if !known[c.ID] {
			err = errors.Join(err, s.noteUnlisted(c))
		}
	}
	return err
}

// deleteOrphan deletes what was removed while no supervisor served, and which
// the one that serves now has adopted.
func (s *Store) deleteOrphan(ctx context.Context, group string, supervisor *client.Client, id string) {
	if s.explains(id) || s.options.Sandboxes.Explains(id) {
		return
	}
	s.noteRemoved("container in supervisor "+group, id, supervisor.Delete(ctx, id, true))
}

// note records what a supervisor reports of a container.
func (s *Store) note(reported *api.Container) {
	s.mu.RLock()
	c := s.byID[reported.GetId()]
	s.mu.RUnlock()
	if c == nil {
		return
	}
	s.change(c, func(f *Facts) {
		f.Unknown = false
		if f.Process.PID == 0 { // the facts of before are lost
			f.Process = process.Facts{PID: int(reported.GetPid()), StartTime: reported.GetStartTime()}
		}
		if f.StartedAt == 0 {
			f.StartedAt = reported.GetStartedAt()
		}
		if exit := reported.GetExit(); exit != nil && reported.GetStatus() == api.Status_STATUS_STOPPED {
			c.takeExit(f, exit.GetCode(), exit.GetCodeKnown(), exit.GetOomKilled(), exit.GetFinishedAt())
			takeStartError(f, exit.GetStartError())
		}
	})
}

// unknownCode is the exit code of a container whose exit status is lost.
const unknownCode = 255

// takeExit notes the end of a container. A supervisor that came after it knows neither
// the code nor when it was; the daemon does if it was the parent meanwhile.
func (c *Container) takeExit(f *Facts, code int32, known, oom bool, at int64) {
	if f.FinishedAt != 0 {
		return
	}
	if at == 0 {
		at = time.Now().UnixNano()
	}
	if seen := c.reaped.Load(); seen != nil {
		at = min(at, seen.at)
		if !known {
			code, known = seen.code, true
		}
	}
	f.FinishedAt, f.ExitCode, f.OOMKilled, f.Unknown = at, code, oom, false
	if !known {
		f.ExitCode, f.Reason, f.Message = unknownCode, reasonUnknown, "the container ended while nothing that runs was its parent: its exit status is lost"
	}
}

// takeStartError: the container has ended because its program could not be
// executed.
func takeStartError(f *Facts, message string) {
	if message == "" || f.Reason == reasonStartError {
		return
	}
	f.StartedAt = f.FinishedAt
	f.ExitCode, f.Reason, f.Message = startErrorCode, reasonStartError, message
}

// noteEnded ends a container that no supervisor has any more; exit is nil if none has
// written how.
func (s *Store) noteEnded(c *Container, exit *api.ExitRecord) {
	s.change(c, func(f *Facts) {
		if exit != nil {
			c.takeExit(f, exit.Code, exit.CodeKnown, exit.OOMKilled, exit.FinishedAt)
			takeStartError(f, exit.StartError)
			return
		}
		c.takeExit(f, 0, f.StartError != "", false, 0)
		takeStartError(f, f.StartError)
	})
}

// change updates the facts from outside of an operation on the container, and
// does not wait for one.
func (s *Store) change(c *Container, change func(*Facts)) {
	if err := s.write(c, change); err != nil {
		s.log(c).Error("the facts of a container are not on disk", "err", err)
	}
}

// Known implements process.Orphans: the inits of containers come to the daemon when
// their supervisor dies.
func (s *Store) Known(facts process.Facts) bool { return s.byProcess(facts) != nil }

// reaped is how a process has ended, as its parent has seen it.
type reaped struct {
	code int32 // 128 + signal if killed by one
	at   int64 // in nanoseconds since 1970
}

func reapedNow(status unix.WaitStatus) *reaped {
	end := &reaped{code: int32(status.ExitStatus()), at: time.Now().UnixNano()}
	if status.Signaled() {
		end.code = 128 + int32(status.Signal())
	}
	return end
}

// Ended implements process.Orphans: the exit status of an init whose supervisor has
// died is handed to the successor, which keeps exits. There may be none for a long
// time: the daemon remembers it, too.
func (s *Store) Ended(facts process.Facts, status unix.WaitStatus) {
	c := s.byProcess(facts)
	if c == nil {
		return // removed at the same time
	}
	c.reaped.Store(reapedNow(status))
	s.work.Go(func() {
		ctx, cancel := s.within(s.limits.Load().Kill)
		defer cancel()
		supervisor, err := s.shimOf(ctx, c.group())
		if err == nil {
			err = supervisor.NoteExit(ctx, c.ID, facts.PID, facts.StartTime, uint32(status))
		}
		if err != nil {
			s.log(c).Warn("the exit status of a container did not reach its supervisor", "err", err)
		}
	})
}

func (s *Store) byProcess(facts process.Facts) *Container {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, c := range s.byID {
		if c.Facts().Process == facts {
			return c
		}
	}
	return nil
}

// emit publishes an event of a listed container.
func (s *Store) emit(c *Container, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && c.listed.Load() {
		s.options.Events.ContainerEvent(c, kind)
	}
}

// emitChange emits the events of a change of facts. A container may have started and
// ended in one change, while no daemon ran; one that could not be started has only
// ended.
func (s *Store) emitChange(c *Container, before, after *Facts) {
	if before.StartedAt == 0 && after.StartedAt != 0 && after.Reason != reasonStartError {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	}
	if before.FinishedAt == 0 && after.FinishedAt != 0 {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
}

// listEnded lists a container that has ended before it was listed.
func (s *Store) listEnded(c *Container) {
	c.listed.Store(true)
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
}
