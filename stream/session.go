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

	"github.com/minicri/minicri/stream/spdy"
)

const (
	// deliveryTime is how long the delivery of what a client of port-forward had
	// sent before it left may take.
	deliveryTime = 2 * time.Second
	// lingerTime is how long a client may take to close its end after ours: to
	// close at once what it still writes to would reset the connection, and lose
	// what it has not read yet (RFC 1122, 4.2.2.13).
	lingerTime = time.Second
	// watchEvery is how often a session looks for a client that has left.
	watchEvery = time.Second
)

// session serves one client, while its connection lasts. It is the response to
// the client's request, which becomes the connection.
type session struct {
	http.ResponseWriter
	server  *Server
	request *http.Request
	// ctx ends with the client's connection, with the idle time-out, and with the
	// daemon; lost ends it.
	ctx  context.Context
	lost context.CancelFunc
	// patient: what a client has sent before it left still counts.
	patient bool
	// active is when something last passed, in nanoseconds since 1970.
	active atomic.Int64
	// work are the goroutines of the session.
	work sync.WaitGroup
	conn *clientConn // nil before Hijack
}

// session serves a request, and returns when nothing of the session is left.
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
	if one.conn != nil {
		one.conn.end()
	}
	cancel()
	one.work.Wait()
}

// touch notes that something has passed.
func (s *session) touch() { s.active.Store(time.Now().UnixNano()) }

// gone handles the end of what the client sends.
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
	if err != nil && s.ctx.Err() == nil {
		s.server.options.Logger.Warn(what, "err", err)
	}
}

// Hijack implements http.Hijacker.
func (s *session) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	raw, buffer, err := http.NewResponseController(s.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	early, _ := buffer.Reader.Peek(buffer.Reader.Buffered()) // of what is there it cannot fail
	s.conn = &clientConn{Conn: raw, session: s, reader: io.MultiReader(bytes.NewReader(bytes.Clone(early)), raw)}
	// A write to a client that does not read ends with the session.
	context.AfterFunc(s.ctx, func() { _ = raw.Close() })
	s.work.Go(s.watch)
	return s.conn, bufio.NewReadWriter(bufio.NewReader(s.conn), bufio.NewWriter(s.conn)), nil
}

// watch ends a session that is silent, or whose client has closed its end. The
// reader sees neither while it waits for a process that does not read its stdin.
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

// tcpOf is the connection below TLS.
func tcpOf(conn net.Conn) *net.TCPConn {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	return conn.(*net.TCPConn)
}

// reset closes a connection so that the kernel keeps nothing of it.
func reset(conn net.Conn) {
	tcp := tcpOf(conn)
	_ = tcp.SetLinger(0)
	_ = tcp.Close()
}

// clientConn is the client's connection, which tells the session what passes.
type clientConn struct {
	net.Conn
	session *session
	reader  io.Reader // begins with what came with the HTTP request
	closed  sync.Once
}

// Read implements net.Conn.
func (c *clientConn) Read(p []byte) (int, error) {
	n, err := c.reader.Read(p)
	if err != nil {
		c.session.gone()
	}
	c.session.touch()
	return n, err
}

// Write implements net.Conn.
func (c *clientConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err != nil {
		c.session.lost()
	}
	c.session.touch()
	return n, err
}

// Close says that nothing more is written. What has been written is still to arrive.
func (c *clientConn) Close() error {
	c.closed.Do(func() {
		if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite() // fails if the client is gone
		}
	})
	return nil
}

// end closes the connection when the client has closed it.
func (c *clientConn) end() {
	_ = c.Close()
	_ = c.SetReadDeadline(time.Now().Add(lingerTime))
	_, _ = io.Copy(io.Discard, c.Conn)
	_ = c.Conn.Close()
}

// upgradeSPDY makes the HTTP connection one of SPDY, with the first of the
// client's subprotocols that is served. A client that is refused has got its answer.
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

// serveSPDY reads a connection to its end, as work of the session. The channel
// is closed then.
func (s *session) serveSPDY(conn *spdy.Conn) <-chan struct{} {
	served := make(chan struct{})
	s.work.Go(func() {
		defer close(served)
		s.report("a client breaks the protocol", conn.Serve())
		s.gone()
	})
	return served
}

// stallTime is how long a pod may take nothing while the client has more for it.
// The transport has no flow control for each connection: until then it holds up
// the others of its session, and then it is ended.
const stallTime = 5 * time.Second

var errStalled = errors.New("the pod has taken nothing for " + stallTime.String() +
	" while more came for it: the connection is ended, so that it does not hold up the others of the session")

// inlet is the sink of what a client sends to a process or a pod, also while the
// connection there is being made. It holds nothing: what is not taken holds up the
// client's connection.
type inlet struct {
	stalls bool // it is ended when it has taken nothing for stallTime
	// ctx ends with the session, with the client's reset, and when the connection fails.
	ctx    context.Context
	cancel context.CancelCauseFunc
	// open ends, too, when the client sends no more.
	open     context.Context
	shut     context.CancelFunc
	ready    chan struct{} // closed by lead
	upstream halfConn
}

// halfConn is a connection of which one direction can be closed alone.
type halfConn interface {
	net.Conn
	CloseWrite() error
}

func (s *session) newInlet(stalls bool) *inlet {
	i := &inlet{stalls: stalls, ready: make(chan struct{})}
	i.ctx, i.cancel = context.WithCancelCause(s.ctx)
	i.open, i.shut = context.WithCancel(i.ctx)
	return i
}

// lead lets out what comes to a connection; nil drops it.
func (i *inlet) lead(to halfConn) {
	i.upstream = to
	close(i.ready)
	if to == nil {
		return
	}
	context.AfterFunc(i.open, func() { _ = to.CloseWrite() })
	context.AfterFunc(i.ctx, func() {
		if errors.Is(context.Cause(i.ctx), errStalled) {
			reset(to) // what the pod has not read goes with the connection
		}
		_ = to.Close()
	})
}

// Write implements spdy.Sink.
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
		_, _ = i.upstream.Write(p) // one that takes no more may still have something to say
	}
	return len(p), context.Cause(i.ctx)
}

// CloseWrite implements spdy.Sink.
func (i *inlet) CloseWrite() { i.shut() }

// Abort implements spdy.Sink.
func (i *inlet) Abort() { i.cancel(nil) }
