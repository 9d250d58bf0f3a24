package stream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/streaming/pkg/httpstream"
	httpspdy "k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/stream/spdy"
)

const (
	// deliveryTime bounds the delivery of what a client of port-forward sent before it left.
	deliveryTime = 2 * time.Second
	// lingerTime is how long a client may take to close its end after ours. Closing a connection to
	// which it still writes would reset it, and lose what it has not read (RFC 1122, 4.2.2.13).
	lingerTime = time.Second
	watchEvery = time.Second // how often a session looks for a client that has left
)

// session serves one client. It is the response to its request, which becomes the connection.
type session struct {
	http.ResponseWriter
	server  *Server
	request *http.Request
	ctx     context.Context // ends with the client's connection, the idle time-out, or the daemon
	lost    context.CancelFunc
	patient bool           // what a client sent before it left is still delivered
	active  atomic.Int64   // when something last passed, in nanoseconds since 1970
	work    sync.WaitGroup // the session's goroutines
	conn    *clientConn    // nil before Hijack
}

func (s *Server) session(w http.ResponseWriter, r *http.Request, asked request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	one := &session{ResponseWriter: w, server: s, request: r, ctx: ctx, lost: cancel, patient: asked.kind == kindPortForward}
	one.touch()
	if asked.kind == kindPortForward {
		one.forward(asked)
	} else {
		one.runCommand(asked)
	}
	if c := one.conn; c != nil {
		_ = c.Close()
		_ = c.SetReadDeadline(time.Now().Add(lingerTime))
		_, _ = io.Copy(io.Discard, c.Conn)
		_ = c.Conn.Close()
	}
	cancel()
	one.work.Wait()
}

func (s *session) touch() { s.active.Store(time.Now().UnixNano()) }

// gone ends the session when the client sends no more.
func (s *session) gone() {
	if s.patient {
		time.AfterFunc(deliveryTime, s.lost)
		return
	}
	s.lost()
}

// report logs how a session failed, unless the session has ended anyway.
func (s *session) report(what string, err error) {
	if err != nil && s.ctx.Err() == nil {
		s.server.options.Logger.Warn(what, "err", err)
	}
}

func (s *session) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	raw, buffer, err := http.NewResponseController(s.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	early, _ := buffer.Reader.Peek(buffer.Reader.Buffered()) // cannot fail
	s.conn = &clientConn{Conn: raw, session: s, reader: io.MultiReader(bytes.NewReader(bytes.Clone(early)), raw)}
	context.AfterFunc(s.ctx, func() { _ = raw.Close() }) // ends a write to a client that does not read
	s.work.Go(s.watch)
	return s.conn, bufio.NewReadWriter(bufio.NewReader(s.conn), bufio.NewWriter(s.conn)), nil
}

// watch ends a session that is silent, or whose client has closed its end. The reader does not see
// that while it waits for a process that does not read its stdin.
func (s *session) watch() {
	raw, err := tcpOf(s.conn.Conn).SyscallConn()
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	for left := false; err == nil && !left; {
		select {
		case <-s.ctx.Done():
			return
		case <-ticker.C:
		}
		if silence := time.Now().UnixNano() - s.active.Load(); silence >= int64(s.server.options.Idle) {
			s.lost()
		}
		err = raw.Control(func(fd uintptr) { left = ready(fd, unix.POLLRDHUP) })
	}
	s.gone()
}

// ready reports whether one of the events of poll(2) has happened.
func ready(fd uintptr, events int16) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: events}}
	n, err := unix.Poll(poll, 0)
	return n > 0 && err == nil
}

func tcpOf(conn net.Conn) *net.TCPConn {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	return conn.(*net.TCPConn)
}

// reset closes a connection, and the kernel drops its data.
func reset(conn net.Conn) {
	tcp := tcpOf(conn)
	_ = tcp.SetLinger(0)
	_ = tcp.Close()
}

// clientConn is the client's connection. It tells the session what passes.
type clientConn struct {
	net.Conn
	session *session
	reader  io.Reader // begins with what came with the HTTP request
	closed  sync.Once
}

func (c *clientConn) Read(p []byte) (int, error) {
	n, err := c.reader.Read(p)
	if err != nil {
		c.session.gone()
	}
	c.session.touch()
	return n, err
}

func (c *clientConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err != nil {
		c.session.lost()
	}
	c.session.touch()
	return n, err
}

// Close only ends the writing, so that what has been written still arrives.
func (c *clientConn) Close() error {
	c.closed.Do(func() {
		if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite() // fails if the client is gone
		}
	})
	return nil
}

// upgradeSPDY upgrades to SPDY with the first subprotocol that is served, or answers why it does not.
func (s *session) upgradeSPDY(protocols ...string) (net.Conn, string, error) {
	r := s.request
	if !httpstream.IsUpgradeRequest(r) || !strings.EqualFold(r.Header.Get(httpstream.HeaderUpgrade), httpspdy.HeaderSpdy31) {
		http.Error(s, "upgrade to SPDY/3.1, or to a WebSocket", http.StatusBadRequest)
		return nil, "", fmt.Errorf("upgrade to %q is not served", r.Header.Get(httpstream.HeaderUpgrade))
	}
	protocol, err := httpstream.Handshake(r, s, protocols)
	if err != nil {
		return nil, "", err
	}
	s.Header().Set(httpstream.HeaderConnection, httpstream.HeaderUpgrade)
	s.Header().Set(httpstream.HeaderUpgrade, httpspdy.HeaderSpdy31)
	s.WriteHeader(http.StatusSwitchingProtocols)
	conn, _, err := s.Hijack()
	return conn, protocol, err
}

// serveSPDY reads a connection to its end, and closes the channel then.
func (s *session) serveSPDY(conn *spdy.Conn) <-chan struct{} {
	served := make(chan struct{})
	s.work.Go(func() {
		defer close(served)
		s.report("a client breaks the protocol", conn.Serve())
		s.gone()
	})
	return served
}

// stallTime is how long a pod may read nothing while the client has more for it. The transport has no
// flow control for each connection, so the pod holds up the others of its session until then.
const stallTime = 5 * time.Second

var errStalled = errors.New("the pod has taken nothing for " + stallTime.String() +
	" while more came for it: the connection is ended, so that it does not hold up the others of the session")

// inlet is the sink of what a client sends to a process or a pod, even before the connection there
// is made. It buffers nothing, so what is not taken holds up the client's connection.
type inlet struct {
	stalls   bool            // stallTime applies
	ctx      context.Context // ends with the session, the client's reset, or a failed connection
	cancel   context.CancelCauseFunc
	open     context.Context // also ends when the client sends no more
	shut     context.CancelFunc
	ready    chan struct{} // closed by lead
	upstream container.Input
}

func (s *session) newInlet(stalls bool) *inlet {
	i := &inlet{stalls: stalls, ready: make(chan struct{})}
	i.ctx, i.cancel = context.WithCancelCause(s.ctx)
	i.open, i.shut = context.WithCancel(i.ctx)
	return i
}

// lead connects the inlet; nil drops what comes.
func (i *inlet) lead(to container.Input) {
	i.upstream = to
	close(i.ready)
	if to == nil {
		return
	}
	context.AfterFunc(i.open, func() { _ = to.CloseWrite() })
	context.AfterFunc(i.ctx, func() {
		if conn, is := to.(net.Conn); is && errors.Is(context.Cause(i.ctx), errStalled) {
			reset(conn)
		}
		_ = to.Close()
	})
}

func (i *inlet) Write(p []byte) (int, error) {
	if i.stalls {
		stalled := time.AfterFunc(stallTime, func() { i.cancel(errStalled) })
		defer stalled.Stop()
	}
	select {
	case <-i.ready:
	case <-i.ctx.Done():
		return 0, context.Cause(i.ctx)
	}
	if i.upstream != nil {
		_, _ = i.upstream.Write(p) // if it fails, output may still come
	}
	return len(p), context.Cause(i.ctx)
}

func (i *inlet) CloseWrite() { i.shut() }
func (i *inlet) Abort()      { i.cancel(nil) }
