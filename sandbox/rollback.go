package sandbox

import (
	"errors"
	"sync"
)

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
	s.options.Logger.Info("roll back a sandbox that was partially created", "sandbox", sb.ID)
	if err := s.destroy(ctx, sb, leaveToJournal); err != nil {
		s.options.Logger.Error("a partially created sandbox could not be rolled back: stop and remove it", "sandbox", sb.ID, "err", err)
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
