package stream

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

const (
	// tokenLife is how long a client may take to come.
	tokenLife = time.Minute
	// idleGrace is how long a session has to be silent before it makes room for
	// another one, when there are too many.
	idleGrace = time.Minute
)

// The kinds of requests, which are also in their URLs.
const (
	kindExec        = "exec"
	kindAttach      = "attach"
	kindPortForward = "portforward"
)

// request is what a URL stands for.
type request struct {
	kind string
	// target is the id of a container, or of a sandbox for port-forward.
	target  string
	options remotecommand.Options // of exec and attach
	command []string              // of exec
	ports   []int32               // of port-forward over a WebSocket with channels
}

// requests are those whose client has not come yet, by their tokens, and the
// sessions of those whose client is here.
type requests struct {
	limit int // of both together

	mu      sync.Mutex
	pending map[string]*pending
	open    map[*session]struct{}
	closed  bool
	// handled counts the sessions that have not ended, to wait for.
	handled sync.WaitGroup
}

// pending is a request that waits for its client.
type pending struct {
	request request
	expires *time.Timer
}

func newRequests(limit int) *requests {
	return &requests{limit: limit, pending: make(map[string]*pending), open: make(map[*session]struct{})}
}

// add makes a token for a request; errdefs.ErrResourceExhausted when there are
// too many, and none of them is a session that is silent.
func (r *requests) add(one request) (token string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return "", fmt.Errorf("exec, attach and port-forward are not served any more: %w", errdefs.ErrUnavailable)
	}
	if len(r.pending)+len(r.open) >= r.limit && !r.makeRoom() {
		return "", fmt.Errorf("%d requests to exec, attach or port-forward are open, which is the limit (streaming.max_open): %w", r.limit, errdefs.ErrResourceExhausted)
	}
	token = rand.Text()
	r.pending[token] = &pending{request: one, expires: time.AfterFunc(tokenLife, func() { r.expire(token) })}
	return token, nil
}

// makeRoom ends the session that has been silent longest, if there is one whose
// time is over; mu is held.
func (r *requests) makeRoom() bool {
	var oldest *session
	for s := range r.open {
		if s.silence() >= idleGrace && (oldest == nil || s.silence() > oldest.silence()) {
			oldest = s
		}
	}
	if oldest == nil {
		return false
	}
	oldest.lost()
	delete(r.open, oldest)
	return true
}

func (r *requests) expire(token string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pending, token)
}

// take uses a token up, and reports whether there is such a one.
func (r *requests) take(token string) (one request, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pending[token]
	if p == nil {
		return request{}, false
	}
	delete(r.pending, token)
	p.expires.Stop()
	return p.request, true
}

// begin counts a session, and reports whether sessions may still begin. The
// caller calls end when it has ended.
func (r *requests) begin(s *session) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.open[s] = struct{}{}
	r.handled.Add(1)
	return true
}

func (r *requests) end(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.open, s)
	r.handled.Done()
}

// close drops all that are pending, takes no more, and waits for the sessions.
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
