// Package object has what pods and containers have in common. An Object has a random id, from
// which every path and every name in the kernel follows, a unique name, facts, a timeline, and
// a lock for the operations that change it. A Store holds the objects of one kind.
//
// Store.mu guards the maps and the last creation time. It is never held while anything runs or is written,
// so one object never waits for another. Readers take no object's lock: facts are replaced, not changed.
package object

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/internal/validate"
)

// NewID makes an id.
func NewID() string {
	var id [32]byte
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return hex.EncodeToString(id[:])
}

// DecodeConfig decodes the config of a request as it is stored; a later daemon may have stored unknown fields.
func DecodeConfig[M any, C interface {
	proto.Message
	GetMetadata() *M
}](stored []byte, config C) (C, error) {
	err := protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(stored, config)
	if err == nil && config.GetMetadata() == nil {
		err = errors.New("it has no metadata")
	}
	if err != nil {
		err = fmt.Errorf("decode the config: %w", err)
	}
	return config, err
}

// Key is what a store knows an object by.
type Key struct {
	ID, Name string
	Created  int64 // in nanoseconds since 1970
	Size     int   // in the list of all objects, without texts, in bytes
}

type core struct {
	key    Key
	kind   string
	listed atomic.Bool
}

func (c *core) base() *core { return c }

// Listed reports whether clients may see the object.
func (c *core) Listed() bool { return c.listed.Load() }

// Show lists the object.
func (c *core) Show() { c.listed.Store(true) }

// Object is the common part of pods and containers; F are the facts. Init makes it ready.
type Object[F any] struct {
	core
	Rows    *step.Timeline // the timeline
	Failure error          // why the object could not be made; used under the lock

	facts atomic.Pointer[F]
	lock  *semaphore.Weighted
}

// Init makes an object of a kind, which is not listed.
func (o *Object[F]) Init(kind string, key Key) {
	o.kind, o.key = kind, key
	o.Rows, o.lock = step.NewTimeline(nil), semaphore.NewWeighted(1)
	o.facts.Store(new(F))
}

// Acquire takes the object's lock, or gives up with the context.
func (o *Object[F]) Acquire(ctx context.Context) (unlock func(), err error) {
	if o.lock.Acquire(ctx, 1) != nil {
		return nil, fmt.Errorf("wait for another operation on %s %s: %w", o.kind, o.key.ID, context.Cause(ctx))
	}
	return o.Unlock, nil
}

// LockNew takes the lock of an object that no other goroutine has yet.
func (o *Object[F]) LockNew() { o.lock.TryAcquire(1) }

// Unlock releases the lock, which the caller holds.
func (o *Object[F]) Unlock() { o.lock.Release(1) }

// Facts returns what is known of the object. It is read-only.
func (o *Object[F]) Facts() *F { return o.facts.Load() }

// Update replaces the facts; one goroutine at a time may call it.
func (o *Object[F]) Update(change func(*F)) *F {
	next := *o.facts.Load()
	change(&next)
	o.facts.Store(&next)
	return &next
}

// Restore sets the facts and the timeline that an earlier daemon left.
func (o *Object[F]) Restore(facts F, rows []step.Row) {
	o.facts.Store(&facts)
	o.Rows = step.NewTimeline(rows)
}

// Timeline returns what this and earlier daemons did to the object.
func (o *Object[F]) Timeline() []step.Row { return o.Rows.Rows() }

// Keep writes the timeline of what is gone, or could not be made.
func Keep(lives *step.Lives, logger *slog.Logger, life step.Life) {
	if err := lives.Keep(life); err != nil {
		logger.Warn("the timeline of the "+life.Kind+" is not kept", "name", life.Name, "err", err)
	}
}

// Await waits for a call on a path, up to ctx. On a dead mount it may never return, so one is left for each path.
func Await(ctx context.Context, calls *singleflight.Group, path string, call func() (string, error)) (string, error) {
	select {
	case done := <-calls.DoChan(path, func() (any, error) { return call() }):
		return done.Val.(string), done.Err
	case <-ctx.Done():
		if cause := context.Cause(ctx); !errors.Is(cause, context.DeadlineExceeded) {
			return "", fmt.Errorf("wait for %s on the node: %w", path, cause)
		}
		// %v: the deadline is not the caller's.
		return "", fmt.Errorf("%s on the node does not answer, it may be on a mount whose server is gone: %w: %v", path, errdefs.ErrUnavailable, context.Cause(ctx))
	}
}

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
