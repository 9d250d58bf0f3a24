package stream

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// session is what is done for one client, while its connection lasts.
type session struct {
	server *Server
	// request is the client's; its context ends with the client's connection,
	// with the idle time-out, and with the daemon.
	request *http.Request
	// lost ends that context.
	lost context.CancelFunc
	// patient: what a client has sent before it left still counts.
	patient bool
	// active is when something last passed, in nanoseconds since 1970.
	active atomic.Int64
	// work are the goroutines of the session.
	work sync.WaitGroup
}

// deliveryTime is how long the delivery of what a client had sent before it left
// may take, where it counts.
const deliveryTime = 2 * time.Second

// session serves a request, and returns when nothing of the session is left.
func (s *Server) session(w http.ResponseWriter, r *http.Request, asked request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	quiet := klog.NewContext(ctx, logr.FromSlogHandler(lowered{s.options.Logger.Handler()}))
	one := &session{server: s, request: r.WithContext(quiet), lost: cancel}
	one.touch()
	if !s.requests.begin(one) {
		http.Error(w, "minicri is shutting down", http.StatusServiceUnavailable)
		return
	}
	defer s.requests.end(one)
	u := &upgrade{ResponseWriter: w, session: one}
	if asked.kind == kindPortForward {
		one.patient = true
		one.forward(u, asked)
	} else {
		one.runCommand(u, asked)
	}
	u.end()
	cancel()
	one.work.Wait()
}

// touch notes that something has passed.
func (s *session) touch() { s.active.Store(time.Now().UnixNano()) }

// silence is how long nothing has passed.
func (s *session) silence() time.Duration {
	return time.Duration(time.Now().UnixNano() - s.active.Load())
}

// gone handles the end of what the client sends. The session ends at once, or
// when what has arrived had its time.
func (s *session) gone() {
	if s.patient {
		time.AfterFunc(deliveryTime, s.lost)
		return
	}
	s.lost()
}

// report logs how a session failed, unless its client's leaving is all there
// is to it.
func (s *session) report(what string, err error) {
	if err != nil && s.request.Context().Err() == nil {
		s.server.options.Logger.Warn(what, "err", err)
	}
}

// lowered is a handler for what the libraries say of a session: a client that
// goes away is an error to them and none to the node. What is one, the session
// says itself.
type lowered struct{ slog.Handler }

// Enabled implements slog.Handler.
func (l lowered) Enabled(ctx context.Context, _ slog.Level) bool {
	return l.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle implements slog.Handler.
func (l lowered) Handle(ctx context.Context, r slog.Record) error {
	if !l.Handler.Enabled(ctx, slog.LevelDebug) {
		return nil // logr asks Enabled, except for errors
	}
	r.Level = slog.LevelDebug
	return l.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (l lowered) WithAttrs(attrs []slog.Attr) slog.Handler {
	return lowered{l.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (l lowered) WithGroup(name string) slog.Handler { return lowered{l.Handler.WithGroup(name)} }
