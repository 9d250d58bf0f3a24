// Package object has what pods and containers have in common. An Object has a random id, from
// which every path and every name in the kernel follows, a unique name, facts, a timeline, and
// a lock for the operations that change it. A Store holds the objects of one kind.
//
// Store.mu guards the maps and the last creation time. It is never held while anything runs or is written,
// so one object never waits for another. Readers take no object's lock: facts are replaced, not changed.
package object

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/minicri/minicri/internal/step"
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

// Hold takes the lock of an object that no other goroutine has.
func (o *Object[F]) Hold() { o.lock.TryAcquire(1) }

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
		logger.Warn("the timeline of a "+life.Kind+" is not kept", "name", life.Name, "err", err)
	}
}

// WithNRI is what needs a node with NRI (step.Step.Only).
const WithNRI = "NRI"

// Steps returns the steps of an operation, in order. Those that begin with nri exist only WithNRI.
func Steps(operation string, names ...step.Name) (steps []step.Step) {
	for _, name := range names {
		one := step.Step{Name: name, Operation: operation}
		if strings.HasPrefix(name.Own(), "nri ") {
			one.Only = WithNRI
		}
		steps = append(steps, one)
	}
	return steps
}

// Await waits for a call on a path, up to ctx. On a dead mount it may never return, so one is left for each path.
func Await(ctx context.Context, calls *singleflight.Group, path string, call func() error) error {
	select {
	case done := <-calls.DoChan(path, func() (any, error) { return nil, call() }):
		return done.Err
	case <-ctx.Done():
		// %v: the deadline is not the caller's.
		return fmt.Errorf("%s on the node does not answer, it may be on a mount whose server is gone: %w: %v", path, errdefs.ErrUnavailable, context.Cause(ctx))
	}
}
