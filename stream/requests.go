package stream

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// tokenLife is how long a client may take to come.
const tokenLife = time.Minute

// requests are those whose client has not come yet, by their tokens, and the
// count of those whose client is here.
type requests struct {
	limit int // of both together

	mu      sync.Mutex
	pending map[string]*pending
	open    int
	closed  bool
	// handled is open, to wait for.
	handled sync.WaitGroup
}

// pending is a request that waits for its client.
type pending struct {
	handle  handler
	expires *time.Timer
}

func newRequests(limit int) *requests {
	return &requests{limit: limit, pending: make(map[string]*pending)}
}

// add makes a token for a request; errdefs.ErrResourceExhausted when there are
// too many.
func (r *requests) add(handle handler) (token string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return "", fmt.Errorf("exec, attach and port-forward are not served any more: %w", errdefs.ErrUnavailable)
	}
	if len(r.pending)+r.open >= r.limit {
		return "", fmt.Errorf("%d requests to exec, attach or port-forward are open, no more are taken (streaming.max_open): %w", r.limit, errdefs.ErrResourceExhausted)
	}
	token = rand.Text()
	r.pending[token] = &pending{handle: handle, expires: time.AfterFunc(tokenLife, func() { r.expire(token) })}
	return token, nil
}

func (r *requests) expire(token string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pending, token)
}

// take uses a token up, nil if there is none such. The caller calls done when
// the request is.
func (r *requests) take(token string) handler {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pending[token]
	if p == nil {
		return nil
	}
	delete(r.pending, token)
	p.expires.Stop()
	r.open++
	r.handled.Add(1)
	return p.handle
}

func (r *requests) done() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open--
	r.handled.Done()
}

// close drops all that are pending, takes no more, and waits for the open ones.
func (r *requests) close() {
	r.mu.Lock()
	r.closed = true
	for token, p := range r.pending {
		p.expires.Stop()
		delete(r.pending, token)
	}
	r.mu.Unlock()
	r.handled.Wait()
}
