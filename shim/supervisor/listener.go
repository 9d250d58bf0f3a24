package supervisor

import (
	"net"
	"sync"
	"time"
)

// watchedListener calls unused when the last of its connections is closed.
type watchedListener struct {
	net.Listener
	unused func()

	mu   sync.Mutex
	open int
}

// firstClient is how long the one who started us may take to connect.
const firstClient = 30 * time.Second

func newWatchedListener(listener net.Listener, unused func()) *watchedListener {
	l := &watchedListener{Listener: listener, unused: unused}
	time.AfterFunc(firstClient, func() {
		l.mu.Lock()
		alone := l.open == 0
		l.mu.Unlock()
		if alone {
			unused()
		}
	})
	return l
}

// Accept is of net.Listener.
func (l *watchedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.open++
	l.mu.Unlock()
	return &watchedConn{UnixConn: conn.(*net.UnixConn), closed: sync.OnceFunc(l.closed)}, nil
}

func (l *watchedListener) closed() {
	l.mu.Lock()
	l.open--
	last := l.open == 0
	l.mu.Unlock()
	if last {
		l.unused()
	}
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
