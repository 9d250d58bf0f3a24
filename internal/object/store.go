package object

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/internal/validate"
)

// Member is a pointer to what embeds an Object.
type Member interface {
	comparable
	base() *core
}

// Store holds the objects of one kind by id and by name, and the goroutines that work on them.
type Store[T Member] struct {
	Base                context.Context // ends when the daemon does
	Waits               context.Context // ends at Cancel, before Base: for calls that the next daemon can repeat
	cancel, cancelWaits context.CancelCauseFunc
	work                sync.WaitGroup
	kind                string

	mu           sync.RWMutex
	byID, byName map[string]T
	lastCreated  int64
}

// NewStore makes an empty store; errors call an object kind.
func NewStore[T Member](ctx context.Context, kind string) *Store[T] {
	s := &Store[T]{kind: kind, byID: make(map[string]T), byName: make(map[string]T)}
	s.Base, s.cancel = context.WithCancelCause(ctx)
	s.Waits, s.cancelWaits = context.WithCancelCause(s.Base)
	return s
}

// Go runs work in the background, which must end soon after Base.
func (s *Store[T]) Go(work func()) { s.work.Go(work) }

var errShutdown = fmt.Errorf("minicri is shutting down: %w", errdefs.ErrUnavailable)

// Cancel ends Waits alone: work under Base, which records how objects end, goes on until Close.
func (s *Store[T]) Cancel() { s.cancelWaits(errShutdown) }

// Close cancels work and waits for it up to the limit: it may be stuck in the kernel.
func (s *Store[T]) Close(limit time.Duration, logger *slog.Logger) {
	s.cancel(errShutdown)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.work.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(limit):
		logger.Error("work has not ended at the shutdown", "on", s.kind, "limit", limit)
	}
}

// Find returns the listed object with the id, or the only one whose id begins so. If there is none it is
// ErrNotFound, if there are several ErrInvalidArgument.
func (s *Store[T]) Find(id string) (found T, err error) {
	var none T
	if id == "" {
		return none, fmt.Errorf("%s id is empty: %w", s.kind, errdefs.ErrInvalidArgument)
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if exact, is := s.byID[id]; is && exact.base().Listed() {
		return exact, nil
	}
	for full, object := range s.byID {
		if !strings.HasPrefix(full, id) || !object.base().Listed() {
			continue
		}
		if found != none {
			return none, fmt.Errorf("%s id %q is the start of several: %w", s.kind, id, errdefs.ErrInvalidArgument)
		}
		found = object
	}
	if found == none {
		return none, fmt.Errorf("%s %q: %w", s.kind, id, errdefs.ErrNotFound)
	}
	return found, nil
}

// Get returns the object with the id, listed or not.
func (s *Store[T]) Get(id string) (T, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	object, is := s.byID[id]
	return object, is
}

// Exists reports whether an object has the id, listed or not.
func (s *Store[T]) Exists(id string) bool {
	_, is := s.Get(id)
	return is
}

// Named returns the object with the name.
func (s *Store[T]) Named(name string) (T, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	object, is := s.byName[name]
	return object, is
}

// List returns the listed objects, the newest first.
func (s *Store[T]) List() []T { return s.All(func(object T) bool { return object.base().Listed() }) }

// All returns the matching objects, listed or not, the newest first.
func (s *Store[T]) All(match func(T) bool) []T {
	s.mu.RLock()
	list := make([]T, 0, len(s.byID))
	for _, object := range s.byID {
		if match(object) {
			list = append(list, object)
		}
	}
	s.mu.RUnlock()
	slices.SortFunc(list, func(a, b T) int { return cmp.Compare(b.base().key.Created, a.base().key.Created) })
	return list
}

// Reserve gives a new object its name and creation time, which at sets before others see the object, or
// returns the one that has the name. The time is the latest even if the clock jumps back: the kubelet
// believes the newest object of a name.
func (s *Store[T]) Reserve(made T, at func(created int64)) (other T, err error) {
	var none T
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := failpoint.Hit("lock " + s.kind); err != nil {
		return none, err
	}
	key := &made.base().key
	if other, taken := s.byName[key.Name]; taken {
		return other, nil
	}
	used := 0
	for _, one := range s.byID {
		used += one.base().key.Size
	}
	if err := validate.Listed(s.kind, len(s.byID), used, key.Size); err != nil {
		return none, err
	}
	s.lastCreated = max(s.lastCreated+1, time.Now().UnixNano())
	key.Created = s.lastCreated
	at(key.Created)
	s.byName[key.Name], s.byID[key.ID] = made, made
	return none, nil
}

// Add adds an object of an earlier daemon, with its name if it is listed: partial ones lose theirs.
func (s *Store[T]) Add(left T) error {
	key := left.base().key
	if left.base().Listed() && !s.TakeName(left) {
		return fmt.Errorf("another %s has the same name %s", s.kind, key.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastCreated = max(s.lastCreated, key.Created)
	s.byID[key.ID] = left
	return nil
}

// TakeName gives an object its name, and returns false if another one has it.
func (s *Store[T]) TakeName(object T) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := object.base().key.Name
	if _, taken := s.byName[name]; taken {
		return false
	}
	s.byName[name] = object
	return true
}

// Forget drops an object and its name.
func (s *Store[T]) Forget(object T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := object.base().key
	delete(s.byID, key.ID)
	if s.byName[key.Name] == object {
		delete(s.byName, key.Name)
	}
}
