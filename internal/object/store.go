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

// Store holds the objects of one kind by id and by name, and the goroutines that work on
// them in the background.
type Store[T Member] struct {
	// Base ends when the daemon does.
	Base   context.Context
	cancel context.CancelCauseFunc
	work   sync.WaitGroup
	kind   string

	mu           sync.RWMutex
	byID, byName map[string]T
	// lastCreated is the newest creation time of any object.
	lastCreated int64
}

// NewStore makes an empty store; kind is what an object is called in errors.
func NewStore[T Member](ctx context.Context, kind string) *Store[T] {
	s := &Store[T]{kind: kind, byID: make(map[string]T), byName: make(map[string]T)}
	s.Base, s.cancel = context.WithCancelCause(ctx)
	return s
}

// errShutdown is the cause of work that a shutdown cut short.
var errShutdown = fmt.Errorf("minicri is shutting down: %w", errdefs.ErrUnavailable)

// Go runs work in the background, which ends soon after Base has.
func (s *Store[T]) Go(work func()) { s.work.Go(work) }

// Cancel ends Base, and with it what waits for it.
func (s *Store[T]) Cancel() { s.cancel(errShutdown) }

// Close cancels what is under way and waits for it, no longer than the limit: work may
// be stuck in the kernel, and the next daemon destroys what it leaves.
func (s *Store[T]) Close(limit time.Duration, logger *slog.Logger) {
	s.Cancel()
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

// Find returns what is listed and has the id, or the only one whose id starts so: people
// type the first digits. It is errdefs.ErrNotFound if there is none, and
// ErrInvalidArgument if it is not clear.
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

// Get returns what has the id, listed or not, and reports whether there is one.
func (s *Store[T]) Get(id string) (T, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	object, is := s.byID[id]
	return object, is
}

// Exists reports whether something has the id, listed or not.
func (s *Store[T]) Exists(id string) bool {
	_, is := s.Get(id)
	return is
}

// Named returns what has the name, and reports whether there is one.
func (s *Store[T]) Named(name string) (T, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	object, is := s.byName[name]
	return object, is
}

// List returns what is listed, the newest first.
func (s *Store[T]) List() []T { return s.All(func(object T) bool { return object.base().Listed() }) }

// All returns what matches, listed or not, the newest first.
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

// Reserve gives a new object its name and its creation time, which is later than that of
// all others: the clock may jump back, and the kubelet takes the newest one of a name for
// the one that counts. It returns the object that has the name already, if one has.
func (s *Store[T]) Reserve(made T) (created int64, other T, err error) {
	var none T
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := failpoint.Hit("lock " + s.kind); err != nil {
		return 0, none, err
	}
	key := &made.base().key
	if other, taken := s.byName[key.Name]; taken {
		return 0, other, nil
	}
	used := 0
	for _, one := range s.byID {
		used += one.base().key.Size
	}
	if err := validate.Listed(s.kind, len(s.byID), used, key.Size); err != nil {
		return 0, none, err
	}
	s.lastCreated = max(s.lastCreated+1, time.Now().UnixNano())
	key.Created = s.lastCreated
	s.byName[key.Name], s.byID[key.ID] = made, made
	return key.Created, none, nil
}

// Add makes an object known that an earlier daemon has left. It has its name only if it
// is listed: of what was partially created the name was free at once.
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

// TakeName gives an object its name, and reports false if another one has it.
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
