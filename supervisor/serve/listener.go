package serve

import (
	"net"
	"sync"
	"time"
)

// watchedListener asks unused when the last of its connections is closed. If it
// answers that it shuts down, no connection is accepted: one that is made from then on
// is closed, and its client finds that no supervisor serves.
type watchedListener struct {
	net.Listener
	unused func() bool

	mu   sync.Mutex
	open int
	over bool
}

// firstClient is how long the daemon that started us may take to connect.
const firstClient = 30 * time.Second

func newWatchedListener(listener net.Listener, unused func() bool) *watchedListener {
	l := &watchedListener{Listener: listener, unused: unused}
	time.AfterFunc(firstClient, func() { l.count(0) })
	return l
}

// Accept is of net.Listener.
func (l *watchedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.count(1) {
			return &watchedConn{UnixConn: conn.(*net.UnixConn), closed: sync.OnceFunc(func() { l.count(-1) })}, nil
		}
		_ = conn.Close()
	}
}

// count adds to the open connections, and reports whether it is not over.
func (l *watchedListener) count(more int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.open += more
	if l.open == 0 {
		l.over = l.unused()
	}
	return !l.over
}

type watchedConn struct {
	*net.UnixConn
	closed func()
}

// Close is of net.Conn.
func (c *watchedConn) Close() error {
	err := c.UnixConn.Close()
	c.closed()
	return err
}
