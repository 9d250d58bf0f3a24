package container

import (
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// Known implements process.Orphans: the inits of containers come to the daemon when
// their supervisor dies.
func (s *Store) Known(facts process.Facts) bool { return s.byProcess(facts) != nil }

// Ended implements process.Orphans: the exit status of an init whose supervisor has
// died is handed to the successor, which keeps exits.
func (s *Store) Ended(facts process.Facts, status unix.WaitStatus) {
	c := s.byProcess(facts)
	if c == nil {
		return // removed at the same time
	}
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
