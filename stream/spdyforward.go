package stream

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/spdystream"
	"golang.org/x/net/websocket"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
)

// maxForwards bounds the connections of one session.
const maxForwards = 1000

// pairs are the streams of a port-forward's session. A client opens two for
// each connection, one for data and one for an error, and names both with the
// same request id.
type pairs struct {
	*forwarder
	conn *spdyConn

	mu    sync.Mutex
	half  map[string]*pair // whose other stream is still to come
	count int              // of those, and of the complete ones
	open  sync.WaitGroup   // the complete ones
}

type pair struct {
	data, errors *spdystream.Stream
	expire       *time.Timer
}

// serveSPDY forwards over SPDY.
func (f *forwarder) serveSPDY(u *upgrade) {
	conn, err := f.session.upgradeSPDY(u, portforward.ProtocolV1Name)
	if err != nil {
		return // the client has been told
	}
	f.servePairs(conn)
}

// serveTunnel forwards over SPDY whose bytes come in the messages of a
// WebSocket. To the node of a cluster the API server speaks SPDY; this is for
// clients that come here without it.
func (f *forwarder) serveTunnel(u *upgrade) {
	server := websocket.Server{
		Handshake: func(c *websocket.Config, _ *http.Request) error {
			for _, protocol := range c.Protocol {
				if protocol == portforward.WebsocketsSPDYTunnelingPortForwardV1 {
					c.Protocol = []string{protocol}
					return nil
				}
			}
			return fmt.Errorf("protocols %q: none is %s", c.Protocol, portforward.WebsocketsSPDYTunnelingPortForwardV1)
		},
		Handler: func(conn *websocket.Conn) {
			conn.PayloadType = websocket.BinaryFrame
			f.servePairs(conn)
		},
	}
	server.ServeHTTP(u, f.session.request)
}

// servePairs returns when the client has closed the connection and all that it
// had sent has been delivered, or the session has ended.
func (f *forwarder) servePairs(conn net.Conn) {
	p := &pairs{forwarder: f, half: make(map[string]*pair)}
	c, err := f.session.newSPDY(conn, p.accept)
	if err != nil {
		f.session.report("serve SPDY", err)
		return
	}
	p.conn = c
	c.serve()
	defer c.close()
	select {
	case <-p.conn.served:
	case <-f.session.request.Context().Done():
		p.conn.close() // which frees those that serve
		<-p.conn.served
	}
	p.open.Wait()
	p.forget()
}

// forget drops the pairs that will never be complete.
func (p *pairs) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.half {
		one.expire.Stop()
	}
	clear(p.half)
}

// accept is called for a stream of the client. It does not wait: the stream
// that completes a pair starts its connection.
func (p *pairs) accept(stream *spdystream.Stream) error {
	port, err := strconv.ParseUint(stream.Headers().Get(portforward.PortHeader), 10, 16)
	if err != nil || port == 0 {
		return fmt.Errorf("header %s: %q is no port", portforward.PortHeader, stream.Headers().Get(portforward.PortHeader))
	}
	if err := reply(stream); err != nil {
		return err
	}
	complete, err := p.add(stream)
	if err != nil {
		return err
	}
	if complete != nil {
		p.session.work.Go(func() { p.connect(complete, int32(port)) })
	}
	return nil
}

// add finds the pair of a stream, and returns it when it is complete; it is
// counted in open then.
func (p *pairs) add(stream *spdystream.Stream) (*pair, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := requestID(stream)
	one := p.half[id]
	if one == nil {
		if p.count >= maxForwards {
			return nil, fmt.Errorf("%d connections are open already: %w", p.count, errdefs.ErrResourceExhausted)
		}
		p.count++
		one = &pair{expire: time.AfterFunc(p.session.server.options.Creation, func() { p.abandon(id) })}
		p.half[id] = one
	}
	if err := one.take(stream); err != nil {
		return nil, err
	}
	if one.data == nil || one.errors == nil {
		return nil, nil
	}
	one.expire.Stop()
	delete(p.half, id)
	p.open.Add(1)
	return one, nil
}

func (one *pair) take(stream *spdystream.Stream) error {
	kind := stream.Headers().Get(portforward.StreamType)
	switch {
	case kind == portforward.StreamTypeData && one.data == nil:
		one.data = stream
	case kind == portforward.StreamTypeError && one.errors == nil:
		one.errors = stream
	default:
		return fmt.Errorf("header %s: %q is unknown, or came twice", portforward.StreamType, kind)
	}
	return nil
}

// requestID is what both streams of a pair have in common. A client that does
// not say it opens the error stream just before the data stream, with numbers
// that differ by 2.
func requestID(stream *spdystream.Stream) string {
	if id := stream.Headers().Get(portforward.PortForwardRequestIDHeader); id != "" {
		return id
	}
	number := stream.Identifier()
	if stream.Headers().Get(portforward.StreamType) == portforward.StreamTypeData {
		number -= 2
	}
	return strconv.FormatUint(uint64(number), 10)
}

// abandon gives up a pair whose other stream did not come in time.
func (p *pairs) abandon(id string) {
	p.mu.Lock()
	one := p.half[id]
	delete(p.half, id)
	if one != nil {
		p.count--
	}
	p.mu.Unlock()
	if one == nil {
		return // it came at the last moment
	}
	if one.errors != nil {
		tell(one.errors, errors.New("the stream for data did not come in time (streaming.creation_timeout)"))
		p.conn.end(one.errors)
	}
	if one.data != nil {
		p.conn.end(one.data)
	}
}

// connect makes the connection of a pair, and says why if it cannot.
func (p *pairs) connect(one *pair, port int32) {
	defer p.open.Done()
	if err := p.forward(port, dataStream{one.data}); err != nil {
		tell(one.errors, err)
	}
	_ = one.errors.Close()
	p.conn.end(one.errors)
	p.conn.end(one.data)
	p.mu.Lock()
	p.count--
	p.mu.Unlock()
}

// dataStream is a client of forward.
type dataStream struct{ *spdystream.Stream }

// Write fails when the client has reset the stream; the library sends on.
func (s dataStream) Write(p []byte) (int, error) {
	if s.IsFinished() {
		return 0, spdystream.ErrWriteClosedStream
	}
	return s.Stream.Write(p)
}

// tell writes an error for the client; one that has gone is not told.
func tell(to io.Writer, err error) { _, _ = io.WriteString(to, err.Error()) }
