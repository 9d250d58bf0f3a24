package container

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// Noted implements client.Follower: it records what supervisors report.
func (s *Store) Noted(event *api.Event) { s.note(event.GetContainer()) }

// Missed implements client.Follower.
func (s *Store) Missed(group string, supervisor *client.Client) {
	ctx, cancel := s.within(s.options.Sandboxes.Limits().Create)
	defer cancel()
	if err := s.reconcile(ctx, group, supervisor); err != nil {
		s.options.Logger.Error("containers of a supervisor are not up to date: its events were missed and it does not list them", "supervisor", group, "err", err)
	}
}

// Lost implements client.Follower. A supervisor of another build ends with its last pod. Otherwise the
// states are Unknown until a successor adopts what still runs.
func (s *Store) Lost(group string, lost error) {
	left := slices.DeleteFunc(s.ofGroup(group), func(c *Container) bool { f := c.Facts(); return !f.supervised() || f.FinishedAt != 0 })
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

// lookUntilFound repeats look until it succeeds, the daemon ends, or the build cannot be served.
func (s *Store) lookUntilFound(group string) {
	for s.Base.Err() == nil {
		ctx, cancel := s.within(s.options.Sandboxes.Limits().Create)
		err := s.look(ctx, group)
		cancel()
		if err == nil {
			return
		}
		if errors.Is(err, client.ErrUnknownBuild) {
			s.options.Logger.Error("containers of another build are left alone, and are listed as they were last known", "supervisor", group, "err", err)
			for _, c := range s.ofGroup(group) {
				s.change(c, func(f *Facts) { f.Unknown = false })
			}
			return
		}
		s.options.Logger.Error("containers have no supervisor: its start is retried", "supervisor", group, "err", err)
	}
}

// look updates the containers of a supervisor that was found, or lost; its successor may be lost as well.
func (s *Store) look(ctx context.Context, group string) error {
	for {
		supervisor, err := s.options.Supervisors.Ensure(ctx, group)
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
		case <-time.After(client.RetryPause):
		case <-ctx.Done():
			return err
		}
	}
}

// reconcile records what the supervisor knows, and has it delete what was removed while it did not serve.
// What it does not know left its exit on disk or was never made; what is being made now is left out.
func (s *Store) reconcile(ctx context.Context, group string, supervisor *client.Client) error {
	made := slices.DeleteFunc(s.ofGroup(group), func(c *Container) bool { return !c.Facts().supervised() })
	list, err := supervisor.List(ctx)
	if err != nil {
		return err
	}
	for _, c := range made {
		s.noteHeldExit(c)
	}
	known := make(map[string]bool)
	for _, reported := range list {
		id := reported.GetId()
		known[id] = true
		s.note(reported)
		if !s.explains(id) && !s.options.Sandboxes.Explains(id) {
			s.noteRemoved("container in supervisor "+group, id, supervisor.Delete(ctx, id, true))
		}
	}
	for _, c := range made {
		if !known[c.ID] {
			err = errors.Join(err, s.noteUnlisted(c))
		}
	}
	return err
}

// noteHeldExit passes on how an init ended that neither a supervisor nor this daemon has reaped: no supervisor
// lived, and this daemon has not started the last one.
func (s *Store) noteHeldExit(c *Container) {
	c.factsLock.Lock()
	status, known := c.held.Exit()
	c.factsLock.Unlock()
	if known && c.reaped.Load() == nil {
		s.Ended(c.Facts().Process, status)
	}
}

func (s *Store) note(reported *api.Container) {
	c, is := s.Get(reported.GetId())
	if !is {
		return
	}
	s.change(c, func(f *Facts) {
		f.Unknown = false
		if f.Process.PID == 0 { // the earlier facts are lost
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

// noteUnlisted handles a container that its supervisor does not know. It has ended, or its record
// cannot be read: then it is Unknown, and can only be stopped.
func (s *Store) noteUnlisted(c *Container) error {
	if c.Facts().FinishedAt != 0 {
		return nil
	}
	exit, err := s.options.Supervisors.ExitOf(c.Supervisor, c.ID)
	if err != nil {
		return err
	}
	if exit == nil {
		running, err := s.options.Kernel.OpenProcess(c.Facts().Process)
		if err == nil {
			s.change(c, func(f *Facts) { f.Unknown = true })
			s.log(c).Error("a container runs that its supervisor does not know: it is left alone, and can only be stopped", "pid", c.Facts().Process.PID)
			return running.Close()
		}
		if !errors.Is(err, process.ErrGone) {
			return fmt.Errorf("find out whether container %s runs: %w", c.ID, err)
		}
	}
	s.noteEnded(c, exit)
	return nil
}

func (s *Store) killUnlisted(c *Container) error {
	if err := s.noteUnlisted(c); err != nil || c.Facts().FinishedAt != 0 {
		return err
	}
	limit := s.options.Sandboxes.Limits().Kill
	err := s.options.Hierarchies.Remove(cgroup.Path(c.CgroupsPath), limit)
	running, openErr := s.options.Kernel.OpenProcess(c.Facts().Process)
	if openErr == nil { // a privileged one may have moved to a cgroup outside
		err = errors.Join(err, running.Kill(limit), running.Close())
	} else if !errors.Is(openErr, process.ErrGone) {
		err = errors.Join(err, openErr)
	}
	if err != nil {
		return fmt.Errorf("end the processes that its supervisor does not know: %w", err)
	}
	return s.noteUnlisted(c)
}

// noteEnded ends a container without a supervisor; exit is nil if none was written.
func (s *Store) noteEnded(c *Container, exit *api.ExitRecord) {
	s.change(c, func(f *Facts) {
		if exit == nil {
			exit = &api.ExitRecord{CodeKnown: f.StartError != "", StartError: f.StartError}
		}
		c.takeExit(f, exit.Code, exit.CodeKnown, exit.OOMKilled, exit.FinishedAt)
		takeStartError(f, exit.StartError)
	})
}

// takeExit notes the end. A late supervisor knows neither code nor time; the daemon does if it was the parent.
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
		f.ExitCode, f.Reason, f.Message = 255, "Unknown", "its exit status is lost: neither a supervisor nor the daemon was its parent when it ended"
	}
	takeStartError(f, c.startFailed)
}

// takeStartError notes that the program could not be executed, with containerd's exit code. The message of the supervisor's
// event may come before the same message with advice.
func takeStartError(f *Facts, message string) {
	if message == "" || f.Reason == reasonStartError && !strings.HasPrefix(message, f.Message) {
		return
	}
	f.StartedAt = f.FinishedAt
	f.ExitCode, f.Reason, f.Message = 128, reasonStartError, message
}

// Known implements process.Orphans: containers' inits come to the daemon when their supervisor dies.
func (s *Store) Known(facts process.Facts) bool { return s.byProcess(facts) != nil }

func (s *Store) byProcess(facts process.Facts) *Container {
	if all := s.All(func(c *Container) bool { return c.Facts().Process == facts }); len(all) > 0 {
		return all[0]
	}
	return nil
}

// reaped is how a process ended, as its parent has seen it.
type reaped struct {
	code int32 // 128 + signal if killed by one
	at   int64 // in nanoseconds since 1970
}

// Ended implements process.Orphans. It tells the successor of a dead supervisor how an init ended.
func (s *Store) Ended(facts process.Facts, status unix.WaitStatus) {
	c := s.byProcess(facts)
	if c == nil {
		return // removed at the same time
	}
	end := &reaped{code: int32(status.ExitStatus()), at: time.Now().UnixNano()}
	if status.Signaled() {
		end.code = 128 + int32(status.Signal())
	}
	c.reaped.Store(end)
	s.Go(func() {
		ctx, cancel := s.within(s.options.Sandboxes.Limits().Kill)
		defer cancel()
		supervisor, err := s.options.Supervisors.Ensure(ctx, c.Supervisor)
		if err == nil {
			err = supervisor.NoteExit(ctx, c.ID, facts.PID, facts.StartTime, uint32(status))
		}
		if err != nil {
			s.log(c).Warn("the exit status of a container did not reach its supervisor", "err", err)
		}
	})
}
