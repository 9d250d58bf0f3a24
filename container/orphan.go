package container

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

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
			s.options.Logger.Warn("the exit status of a container did not reach its supervisor", "container", c.ID, "err", err)
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
