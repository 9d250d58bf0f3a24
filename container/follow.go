package container

import (
	"context"
	"slices"
	"time"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/client"
)

// shimOf returns the connection to the pod's shim, and starts a shim if the pod
// has none. Each connection is followed, from its beginning to its end.
func (s *Store) shimOf(ctx context.Context, sandboxID string) (*client.Client, error) {
	return s.shims.ensure(ctx, sandboxID, func(shim *client.Client) { s.follow(sandboxID, shim) })
}

// follow keeps the facts of a pod's containers up with its shim's events, in a
// goroutine that ends with the shim or with the daemon. The shim keeps the last
// events only: where numbers are missing, the containers are listed.
func (s *Store) follow(sandboxID string, shim *client.Client) {
	s.work.Go(func() {
		last := uint64(0)
		err := shim.Events(s.base, 0, func(event *api.Event) error {
			missed := event.GetSeq() != last+1
			last = event.GetSeq()
			s.note(event.GetContainer())
			if !missed {
				return nil
			}
			ctx, cancel := s.within(s.options.Limits.Kill)
			defer cancel()
			return s.reconcile(ctx, sandboxID, shim)
		})
		if s.base.Err() != nil {
			return
		}
		s.shims.drop(sandboxID, shim)
		s.shimLost(sandboxID, err)
	})
}

// shimLost looks after the containers of a shim that has gone. It is told to
// end with its pod; otherwise another one takes over what still runs, and until
// then nobody knows.
func (s *Store) shimLost(sandboxID string, lost error) {
	left := s.OfPod(sandboxID)
	if len(left) == 0 {
		return
	}
	for _, c := range left {
		s.change(c, func(f *Facts) { f.Unknown = f.inShim() })
	}
	s.options.Logger.Warn("the shim of a pod is gone; another one takes over its containers", "sandbox", sandboxID, "err", lost)
	ctx, cancel := s.within(s.options.Limits.Create)
	defer cancel()
	if err := s.lookAgain(ctx, sandboxID); err != nil {
		s.options.Logger.Error("the containers of a pod have no shim", "sandbox", sandboxID, "err", err)
	}
}

// lookPause is between two looks at a shim that does not serve.
const lookPause = 20 * time.Millisecond

// lookAgain finds out about the containers of a pod whose shim has just been
// found, or lost; the one that takes over may be lost as well.
func (s *Store) lookAgain(ctx context.Context, sandboxID string) error {
	for {
		shim, err := s.shimOf(ctx, sandboxID)
		if err == nil {
			err = s.reconcile(ctx, sandboxID, shim)
		}
		if err == nil || len(s.OfPod(sandboxID)) == 0 {
			return nil
		}
		select {
		case <-time.After(lookPause):
		case <-ctx.Done():
			return err
		}
	}
}

// reconcile takes over what the shim knows of the pod's containers. What it
// does not know has left its exit on disk, or has never been made; what is
// being made just now is its maker's.
func (s *Store) reconcile(ctx context.Context, sandboxID string, shim *client.Client) error {
	made := slices.DeleteFunc(s.OfPod(sandboxID), func(c *Container) bool { return !c.Facts().inShim() })
	list, err := shim.List(ctx)
	if err != nil {
		return err
	}
	known := make(map[string]bool)
	for _, told := range list {
		known[told.GetId()] = true
		s.note(told)
	}
	for _, c := range made {
		if !known[c.ID] {
			s.noteGone(c)
		}
	}
	return nil
}

// note takes over what a shim tells of a container.
func (s *Store) note(told *api.Container) {
	s.mu.RLock()
	c := s.byID[told.GetId()]
	s.mu.RUnlock()
	if c == nil {
		return
	}
	s.change(c, func(f *Facts) {
		f.Unknown = false
		if f.StartedAt == 0 {
			f.StartedAt = told.GetStartedAt()
		}
		if exit := told.GetExit(); exit != nil && told.GetStatus() == api.Status_STATUS_STOPPED {
			takeExit(f, exit.GetCode(), exit.GetCodeKnown(), exit.GetOomKilled(), exit.GetFinishedAt())
			takeStartError(f, exit.GetStartError())
		}
	})
}

// unknownCode is the exit code of a container whose end nobody saw.
const unknownCode = 255

func takeExit(f *Facts, code int32, known, oom bool, at int64) {
	if f.FinishedAt != 0 {
		return
	}
	if at == 0 {
		at = time.Now().UnixNano()
	}
	f.FinishedAt, f.ExitCode, f.OOMKilled, f.Unknown = at, code, oom, false
	if !known {
		f.ExitCode, f.Reason, f.Message = unknownCode, reasonUnknown, "the container ended while nobody could see its exit code"
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

// noteGone ends a container that no shim has any more.
func (s *Store) noteGone(c *Container) {
	exit := s.shims.exitOf(c.SandboxID, c.ID)
	s.change(c, func(f *Facts) {
		if exit != nil {
			takeExit(f, exit.Code, exit.CodeKnown, exit.OOMKilled, exit.FinishedAt)
			takeStartError(f, exit.StartError)
			return
		}
		takeExit(f, 0, f.StartError != "", false, 0)
		takeStartError(f, f.StartError)
	})
}

// change updates the facts from outside of an operation on the container, and
// does not wait for one.
func (s *Store) change(c *Container, change func(*Facts)) {
	if err := s.write(c, change); err != nil {
		s.options.Logger.Error("the facts of a container are not on disk", "container", c.ID, "err", err)
	}
}
