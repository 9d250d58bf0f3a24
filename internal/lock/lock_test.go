package lock_test

import (
	"context"
	"errors"
	"testing"

	"github.com/minicri/minicri/internal/lock"
)

func TestWaiterGivesUpWithItsContext(t *testing.T) {
	m := lock.New()
	if err := m.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("enough")
	waited := make(chan error)
	go func() { waited <- m.Lock(ctx) }()
	cancel(reason)
	if err := <-waited; !errors.Is(err, reason) {
		t.Errorf("got %v", err)
	}
	if m.TryLock() {
		t.Error("two have the lock")
	}
	m.Unlock()
	if err := m.Lock(t.Context()); err != nil {
		t.Errorf("after Unlock: %v", err)
	}
}

// A free lock is taken even with a context that has ended: what destroys an
// object at the end of its time gets at it.
func TestFreeLockIsTaken(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m := lock.New()
	if err := m.Lock(ctx); err != nil {
		t.Errorf("got %v", err)
	}
}
