package stream

import (
	"bufio"
	"bytes"
	"container/list"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// lingerTime is how long a client may take to close its end after ours: to
// close at once what it still writes to would reset the connection, and lose
// what it has not read yet (RFC 1122, 4.2.2.13).
const lingerTime = time.Second

// upgrade is a response that becomes the session's connection.
type upgrade struct {
	http.ResponseWriter
	session *session
	conn    *clientConn
}

// Hijack implements http.Hijacker, for the libraries.
func (u *upgrade) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	hijacker, ok := u.ResponseWriter.(http.Hijacker)
	if !ok {
		return nil, nil, fmt.Errorf("a %s connection cannot be upgraded", u.session.request.Proto)
	}
	raw, buffer, err := hijacker.Hijack()
	if err != nil {
		return nil, nil, err
	}
	early, err := buffer.Reader.Peek(buffer.Reader.Buffered())
	if err != nil {
		_ = raw.Close()
		return nil, nil, err
	}
	conn := &clientConn{Conn: raw, session: u.session, early: bytes.NewReader(bytes.Clone(early))}
	if err := conn.watch(&u.session.work); err != nil {
		_ = raw.Close()
		return nil, nil, err
	}
	conn.silent = time.AfterFunc(conn.idleTimeout(), u.session.lost)
	u.conn = conn
	// A write to a client that does not read ends with the session.
	context.AfterFunc(u.session.request.Context(), func() { _ = raw.Close() })
	return conn, bufio.NewReadWriter(bufio.NewReader(conn), bufio.NewWriter(conn)), nil
}

// end closes the connection, if there is one.
func (u *upgrade) end() {
	if u.conn != nil {
		u.conn.end()
	}
}

// clientConn reports when the client is gone or silent: the libraries do not, or
// not while they wait for the client to read.
type clientConn struct {
	net.Conn
	session *session
	early   *bytes.Reader // what came with the HTTP request
	silent  *time.Timer   // ends the session
	closed  sync.Once
	late    *time.Timer // set by Close
	watched *os.File
}

// idleTimeout is how long nothing may pass.
func (c *clientConn) idleTimeout() time.Duration { return c.session.server.options.Idle }

// Read implements net.Conn.
func (c *clientConn) Read(p []byte) (int, error) {
	if c.early.Len() > 0 {
		return c.early.Read(p)
	}
	n, err := c.Conn.Read(p)
	if err != nil {
		c.session.gone()
		return n, err
	}
	c.silent.Reset(c.idleTimeout())
	c.session.touch()
	return n, nil
}

// Write implements net.Conn.
func (c *clientConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err != nil {
		c.session.lost()
		return n, err
	}
	c.silent.Reset(c.idleTimeout())
	c.session.touch()
	return n, nil
}

// Close is called by the libraries when they are done. What has been written is
// still to arrive.
func (c *clientConn) Close() error {
	c.closed.Do(func() {
		c.late = time.AfterFunc(lingerTime, c.session.lost)
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
	c.late.Stop()
	_ = c.Conn.Close()
	_ = c.watched.Close()
	c.silent.Stop()
}

// watch detects that the client has closed its end while nothing reads: a
// process that does not read its stdin stops the reading of the connection. It
// needs a descriptor of its own, because the other one's readers exclude each
// other.
func (c *clientConn) watch(work *sync.WaitGroup) error {
	raw, err := descriptor(c.Conn)
	if err != nil {
		return err
	}
	c.watched = raw
	events, err := raw.SyscallConn()
	if err != nil {
		return err
	}
	work.Go(func() {
		err := events.Read(hungUp)
		if err != nil {
			return // closed by end
		}
		c.session.gone()
	})
	return nil
}

func hungUp(fd uintptr) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(poll, 0)
	return n > 0 && err == nil
}

// descriptor is a second one of the connection.
func descriptor(conn net.Conn) (*os.File, error) {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	return conn.(*net.TCPConn).File()
}

// maxStrangers bounds the connections that have not shown a token. Every process
// of the node can make some, and each costs a descriptor and some KiB.
const maxStrangers = 256

// strangers are the connections that have not shown a token, the oldest first.
// One too many ends the oldest: a client with a token sends its request at once.
type strangers struct {
	mu    sync.Mutex
	order list.List // of net.Conn
	at    map[net.Conn]*list.Element
}

// watch follows the state of a connection. It implements http.Server.ConnState.
func (s *strangers) watch(conn net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		if oldest := s.add(conn); oldest != nil {
			reset(oldest)
		}
	case http.StateHijacked, http.StateClosed:
		s.remove(conn)
	}
}

// add returns the connection that has to make room, nil if there is enough.
func (s *strangers) add(conn net.Conn) (oldest net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = make(map[net.Conn]*list.Element)
	}
	s.at[conn] = s.order.PushBack(conn)
	if s.order.Len() <= maxStrangers {
		return nil
	}
	oldest = s.order.Remove(s.order.Front()).(net.Conn)
	delete(s.at, oldest)
	return oldest
}

func (s *strangers) remove(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if element := s.at[conn]; element != nil {
		s.order.Remove(element)
		delete(s.at, conn)
	}
}

// reset closes a connection so that the kernel keeps nothing of it.
func reset(conn net.Conn) {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// sessionDescriptors are those of a session: the connection, a second descriptor
// of it, and the three streams of a process.
const sessionDescriptors = 5

// descriptors bounds those of all sessions together, so that the rest of the
// daemon has enough.
type descriptors struct {
	limit int64
	used  atomic.Int64
}

// descriptorLimit is half of what the daemon may have.
func descriptorLimit() int64 {
	const most = 1 << 16
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > 2*most {
		return most
	}
	return int64(limit.Cur / 2)
}

// take counts some; errdefs.ErrResourceExhausted when there are not enough.
func (d *descriptors) take(count int64) error {
	if d.used.Add(count) > d.limit {
		d.used.Add(-count)
		return fmt.Errorf("streaming sessions have %d descriptors open, and no more are left for them: %w", d.limit, errdefs.ErrResourceExhausted)
	}
	return nil
}

func (d *descriptors) release(count int64) { d.used.Add(-count) }
