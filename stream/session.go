package stream

import (
	"context"
	"net/http"
	"sync"

	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// session is what is done for one client, while its connection lasts.
type session struct {
	server *Server
	// request is the client's; its context ends with the client's connection
	// and with the daemon.
	request *http.Request
	// webSocket or SPDY.
	webSocket bool
	// patient: what a client has sent before it went away still counts.
	patient bool
	// work are the goroutines that outlive the library's call.
	work sync.WaitGroup
}

// handler serves one session over an HTTP connection that it upgrades.
type handler func(s *session, w http.ResponseWriter)

// session returns when nothing of it is left.
func (s *Server) session(w http.ResponseWriter, r *http.Request, handle handler) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	one := &session{server: s, request: r.WithContext(ctx), webSocket: wsstream.IsWebSocketRequest(r)}
	u := &upgrade{ResponseWriter: w, ctx: ctx, lost: cancel, session: one}
	handle(one, u)
	u.end()
	cancel()
	one.work.Wait()
}
