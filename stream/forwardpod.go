package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// stallTime is how long a pod may take nothing while the client has more for
	// it. The transport has no flow control for each connection: until then it
	// holds up the others of its session, and then it is ended.
	stallTime = 5 * time.Second
	// earlySize is what is kept of a client while its connection is being made: the
	// beginning of a request.
	earlySize = 2 << 10
	// receiveSize is what is read from a pod at once.
	receiveSize = 32 << 10
)

var errStalled = fmt.Errorf("the pod has taken nothing for %v while more came for it: the connection is ended, so that it does not hold up the others of the session", stallTime)

// podConn is a connection to a pod, and the sink of what a client sends there.
type podConn struct {
	dialed chan struct{} // closed when tcp or err is set
	ended  chan struct{} // closed when the client sends no more

	mu       sync.Mutex
	tcp      *net.TCPConn
	err      error  // why there is none, or why it was ended
	early    []byte // what came before tcp was there
	closed   bool   // the client sends no more
	aborted  bool   // nor does it read
	draining bool   // the pod takes no more
}

func newPodConn() *podConn {
	return &podConn{dialed: make(chan struct{}), ended: make(chan struct{})}
}

// dial makes the connection, and sends what has come early.
func (p *podConn) dial(ctx context.Context, f *forwarder, port int32) (err error) {
	server := f.session.server
	if err := server.descriptors.take(1); err != nil {
		return p.set(nil, err)
	}
	conn, err := server.dialPod(ctx, f.pod, port)
	if err != nil {
		server.descriptors.release(1)
		return p.set(nil, err)
	}
	return p.set(conn.(*net.TCPConn), nil)
}

func (p *podConn) set(tcp *net.TCPConn, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer close(p.dialed)
	if p.tcp, p.err = tcp, err; err != nil {
		return err
	}
	if _, err := tcp.Write(p.early); err != nil { // of a new connection it never waits
		p.draining = true
	}
	p.early = nil
	if p.closed {
		_ = tcp.CloseWrite()
	}
	if p.aborted {
		_ = tcp.Close()
	}
	return nil
}

// Write implements sink.
func (p *podConn) Write(b []byte) (int, error) {
	if p.keep(b) {
		return len(b), nil
	}
	stalled := time.NewTimer(stallTime)
	defer stalled.Stop()
	select {
	case <-p.dialed:
	case <-stalled.C:
		return 0, p.stall()
	}
	p.mu.Lock()
	tcp, err, draining := p.tcp, p.err, p.draining
	p.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if draining {
		return len(b), nil
	}
	_ = tcp.SetWriteDeadline(time.Now().Add(stallTime))
	_, err = tcp.Write(b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, p.stall()
	}
	if err != nil { // the pod takes no more; its answer may still be under way
		p.mu.Lock()
		p.draining = true
		p.mu.Unlock()
	}
	return len(b), nil
}

// keep keeps what comes before the connection is there, if it is little.
func (p *podConn) keep(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tcp != nil || p.err != nil || len(p.early)+len(b) > earlySize {
		return false
	}
	p.early = append(p.early, b...)
	return true
}

// stall ends a connection whose pod does not read.
func (p *podConn) stall() error {
	p.mu.Lock()
	if p.err == nil {
		p.err = errStalled
	}
	if p.tcp != nil {
		_ = p.tcp.SetLinger(0) // what the pod has not read goes with the connection
	}
	p.mu.Unlock()
	p.Abort()
	return errStalled
}

// failure is why the connection was ended, nil if that was in order.
func (p *podConn) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// CloseWrite implements sink.
func (p *podConn) CloseWrite() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end()
	if p.tcp != nil {
		_ = p.tcp.CloseWrite() // fails if the pod has closed it
	}
}

// Abort implements sink. It also is the end of every connection.
func (p *podConn) Abort() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end()
	p.aborted = true
	if p.tcp != nil {
		_ = p.tcp.Close()
	}
}

// end notes that the client sends no more; mu is held.
func (p *podConn) end() {
	if !p.closed {
		p.closed = true
		close(p.ended)
	}
}

// receive copies from the pod to the client. An error says that one of the two
// has ended the connection.
func (f *forwarder) receive(c client, pod *net.TCPConn) error {
	raw, err := pod.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var n int
		var failure error
		err := raw.Read(func(fd uintptr) bool {
			f.sending.Lock() // until the piece is sent
			if f.buffer == nil {
				f.buffer = make([]byte, receiveSize)
			}
			n, failure = unix.Read(int(fd), f.buffer)
			if errors.Is(failure, unix.EAGAIN) {
				f.sending.Unlock()
				return false
			}
			return true
		})
		if err != nil {
			return err // it was closed
		}
		if n > 0 {
			_, failure = c.Write(f.buffer[:n])
		}
		f.sending.Unlock()
		switch {
		case errors.Is(failure, unix.EINTR):
		case failure != nil:
			return failure
		case n == 0:
			return nil
		}
	}
}

// writeError sends an error to the client, if it is still there.
func writeError(to io.Writer, err error) { _, _ = io.WriteString(to, err.Error()) }
