package stream

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"

	"github.com/moby/spdystream"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// spdyConn is a SPDY connection whose client opens streams. The framing is
// spdystream's. It is used without the layers above it in k8s.io/streaming and
// k8s.io/cri-streaming, because those cannot tell when its goroutines have
// ended, and have cases in which they never do: a stream that comes when nobody
// takes streams any more, or whose reply could not be sent.
//
// Streams share five workers of the library, each with a queue of 50 frames: a
// stream whose data nobody takes holds up the others of its connection, and
// nobody else's. All streams are reset at the end, which frees the workers.
type spdyConn struct {
	*spdystream.Connection
	session *session
	// accept replies to a new stream, or says why not. It must not wait: the
	// worker that calls it has other streams, too.
	accept func(*spdystream.Stream) error
	// served is closed when all frames have been handled.
	served chan struct{}

	mu      sync.Mutex
	streams map[uint32]*spdystream.Stream // that are open; nil after close
}

var errClosing = errors.New("the connection is being closed")

// upgradeSPDY makes the HTTP connection one of SPDY, with the first of the
// client's subprotocols that is ours. A client that is refused has been told.
func (s *session) upgradeSPDY(u *upgrade, protocol string) (net.Conn, error) {
	r := s.request
	if !httpstream.IsUpgradeRequest(r) || !strings.EqualFold(r.Header.Get(httpstream.HeaderUpgrade), spdy.HeaderSpdy31) {
		http.Error(u, "upgrade to SPDY/3.1, or to a WebSocket", http.StatusBadRequest)
		return nil, fmt.Errorf("upgrade to %q is none that is known", r.Header.Get(httpstream.HeaderUpgrade))
	}
	if _, err := httpstream.Handshake(r, u, []string{protocol}); err != nil {
		return nil, err
	}
	u.Header().Set(httpstream.HeaderConnection, httpstream.HeaderUpgrade)
	u.Header().Set(httpstream.HeaderUpgrade, spdy.HeaderSpdy31)
	u.WriteHeader(http.StatusSwitchingProtocols)
	conn, _, err := u.Hijack()
	return conn, err
}

// newSPDY makes a connection, of which the caller calls serve and then close.
func (s *session) newSPDY(conn net.Conn, accept func(*spdystream.Stream) error) (*spdyConn, error) {
	connection, err := spdystream.NewConnection(newFrames(conn), true)
	if err != nil {
		return nil, err
	}
	return &spdyConn{
		Connection: connection, session: s, accept: accept,
		served: make(chan struct{}), streams: make(map[uint32]*spdystream.Stream),
	}, nil
}

// serve handles frames, as work of the session.
func (c *spdyConn) serve() {
	c.session.work.Go(func() {
		defer close(c.served)
		c.Serve(c.open)
	})
	c.session.work.Go(func() {
		<-c.CloseChan()
		c.session.gone()
	})
}

// open is called for a new stream. One that is not replied to is reset: else
// the client's reset would hold up its worker for ever.
func (c *spdyConn) open(stream *spdystream.Stream) {
	if err := c.register(stream); err != nil {
		_ = stream.Reset() // fails if the client is gone
		return
	}
	if err := c.accept(stream); err != nil {
		c.end(stream)
	}
}

func (c *spdyConn) register(stream *spdystream.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.streams == nil {
		return errClosing
	}
	c.streams[stream.Identifier()] = stream
	return nil
}

// end ends a stream in both directions.
func (c *spdyConn) end(stream *spdystream.Stream) {
	c.mu.Lock()
	delete(c.streams, stream.Identifier())
	c.mu.Unlock()
	_ = stream.Reset() // fails if the client is gone
}

// close ends all streams, and with them whoever waits for one, and says good-bye
// to the client.
func (c *spdyConn) close() {
	c.mu.Lock()
	streams := c.streams
	c.streams = nil
	c.mu.Unlock()
	for _, stream := range streams {
		_ = stream.Reset()
	}
	_ = c.Close()
}

// reply accepts a stream.
func reply(stream *spdystream.Stream) error { return stream.SendReply(http.Header{}, false) }
