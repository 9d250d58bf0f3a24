package sandbox

import (
	"errors"
	"sync"
)

// rollBack destroys half-made sandboxes, several at a time, each with a limit
// of its own. One that cannot be taken back is listed then, as NotReady, so
// that somebody can try again.
func (s *Store) rollBack(halfMade []*Sandbox) {
	const atOnce = 8
	slots := make(chan struct{}, atOnce)
	var wait sync.WaitGroup
	for _, sb := range halfMade {
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			s.rollBackOne(sb)
		})
	}
	wait.Wait()
	s.sweep()
}

// errCutOff is why a half-made sandbox could not be made.
var errCutOff = errors.New("the daemon ended while the sandbox was being made")

func (s *Store) rollBackOne(sb *Sandbox) {
	ctx, cancel := s.bound(s.base, s.limits.Load().Destroy)
	defer cancel()
	sb.failure = errCutOff
	if sb.lock.Lock(s.base) != nil {
		return
	}
	defer sb.lock.Unlock()
	s.options.Logger.Info("destroy a sandbox that was half made", "sandbox", sb.ID)
	if err := s.destroy(ctx, sb, leaveToJournal); err != nil {
		s.options.Logger.Error("a half-made sandbox could not be destroyed: stop and remove it", "sandbox", sb.ID, "err", err)
		s.listHalfMade(sb)
	}
}

// listHalfMade shows a sandbox that could not be destroyed, with its name unless
// that has been given to another one.
func (s *Store) listHalfMade(sb *Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name := nameOf(sb.config.GetMetadata()); s.byName[name] == nil {
		s.byName[name] = sb
	}
	sb.listed.Store(true)
}
