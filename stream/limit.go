package stream

import (
	"container/list"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

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
