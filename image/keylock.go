package image

import (
	"context"
	"sync"
)

// keyLock is a mutex per key, so that a blob is fetched and a layer unpacked by
// one pull while the others wait for its outcome.
type keyLock struct {
	mu   sync.Mutex // guards held
	held map[string]*keyHolder
}

// keyHolder has a channel of one place: who fills it holds the key.
type keyHolder struct {
	place chan struct{}
	users int
}

func newKeyLock() *keyLock { return &keyLock{held: map[string]*keyHolder{}} }

// Lock waits for the key or for the end of ctx, whose error it then returns.
func (l *keyLock) Lock(ctx context.Context, key string) error {
	holder := l.join(key)
	select {
	case holder.place <- struct{}{}:
		return nil
	case <-ctx.Done():
		l.leave(key, holder)
		return context.Cause(ctx)
	}
}

// Unlock gives a held key back.
func (l *keyLock) Unlock(key string) {
	l.mu.Lock()
	holder := l.held[key]
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
