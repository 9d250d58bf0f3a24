package image

import (
	"context"
	"sync"
	"time"
)

// keyLock is a mutex per key, so that a blob is fetched and a layer unpacked by
// one pull while the others wait for its outcome.
type keyLock struct {
	mu   sync.Mutex // guards held and the holders' fields
	held map[string]*keyHolder
}

// keyHolder has a channel of one place: the pull that fills it holds the key.
type keyHolder struct {
	place chan struct{}
	users int
	meter *meter // of the pull that holds the key
}

func newKeyLock() *keyLock { return &keyLock{held: map[string]*keyHolder{}} }

// lock waits for the key, for the end of ctx, whose error it then returns, or
// until the pull that holds the key is too slow to be waited for: then held is
// false.
func (l *keyLock) lock(ctx context.Context, key string, mine *meter) (held bool, err error) {
	holder := l.join(key)
	look := time.NewTicker(mine.look())
	defer look.Stop()
	for {
		select {
		case holder.place <- struct{}{}:
			l.mu.Lock()
			holder.meter = mine
			l.mu.Unlock()
			return true, nil
		case <-ctx.Done():
			l.leave(key, holder)
			return false, context.Cause(ctx)
		case <-look.C:
			if other := l.holds(holder); other != nil && other != mine && other.slow() {
				l.leave(key, holder)
				return false, nil
			}
		}
	}
}

func (l *keyLock) holds(holder *keyHolder) *meter {
	l.mu.Lock()
	defer l.mu.Unlock()
	return holder.meter
}

// unlock releases a key that lock said is held.
func (l *keyLock) unlock(key string) {
	l.mu.Lock()
	holder := l.held[key]
	holder.meter = nil
	l.mu.Unlock()
	<-holder.place
	l.leave(key, holder)
}

func (l *keyLock) join(key string) *keyHolder {
	l.mu.Lock()
	defer l.mu.Unlock()
	holder := l.held[key]
	if holder == nil {
		holder = &keyHolder{place: make(chan struct{}, 1)}
		l.held[key] = holder
	}
	holder.users++
	return holder
}

func (l *keyLock) leave(key string, holder *keyHolder) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if holder.users--; holder.users == 0 {
		delete(l.held, key)
	}
}

// pullLocks is the keyLock as one pull uses it: a key that a slow pull holds is
// passed, and the work done twice. The stores take the outcome of whichever pull
// is first.
type pullLocks struct {
	locks *keyLock
	meter *meter

	mu     sync.Mutex     // guards passed
	passed map[string]int // by key
}

func (l *keyLock) forPull(m *meter) *pullLocks {
	return &pullLocks{locks: l, meter: m, passed: map[string]int{}}
}

// Lock returns when the key is held or passed, or with the error of ctx.
func (l *pullLocks) Lock(ctx context.Context, key string) error {
	held, err := l.locks.lock(ctx, key, l.meter)
	if err == nil && !held {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.passed[key]++
	}
	return err
}

// Unlock undoes one Lock of the key.
func (l *pullLocks) Unlock(key string) {
	l.mu.Lock()
	passed := l.passed[key] > 0
	if passed {
		l.passed[key]--
	}
	l.mu.Unlock()
	if !passed {
		l.locks.unlock(key)
	}
}
