// Package lock has a mutex whose waiters give up with their context: an object
// that is stuck in one operation holds up none of its other callers for longer
// than they are willing to wait. The package keeps no state.
package lock

import "context"

// Mutex is a mutual exclusion lock. Make one with New.
type Mutex struct{ held chan struct{} }

// New returns an unlocked Mutex.
func New() Mutex { return Mutex{make(chan struct{}, 1)} }

// Lock waits for the lock, or returns the cause of the end of ctx.
func (m Mutex) Lock(ctx context.Context) error {
	if m.TryLock() {
		return nil
	}
	select {
	case m.held <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// TryLock takes the lock if it is free, and reports whether it did.
func (m Mutex) TryLock() bool {
	select {
	case m.held <- struct{}{}:
		return true
	default:
		return false
	}
}

// Unlock releases the lock, which the caller must hold.
func (m Mutex) Unlock() { <-m.held }
