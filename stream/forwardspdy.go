package stream

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/websocket"
	"k8s.io/cri-streaming/pkg/streaming/portforward"

	"github.com/minicri/minicri/stream/spdy"
)

// maxForwards bounds the connections of one session: each costs the daemon some
// KiB, and a session no more than a MiB.
const maxForwards = 128

// pairs are the streams of a port-forward's session. A client opens two for
// each connection, one for data and one for an error, and names both with the
// same request id.
type pairs struct {
	*forwarder
	conn *spdy.Conn

	mu    sync.Mutex
	half  map[string]*pair // whose other stream is still to come
	count int              // of those, and of the complete ones
	open  sync.WaitGroup   // the complete ones
}

type pair struct {
	data, errors *spdy.Stream
	pod          *podConn // of data
	expire       *time.Timer
}

// serveSPDY forwards over SPDY.
func (f *forwarder) serveSPDY(u *upgrade) {
	conn, _, err := f.session.upgradeSPDY(u, portforward.ProtocolV1Name)
	if err != nil {
		return // the client has its answer
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
	p.conn = spdy.NewConn(conn, p.accept)
	defer p.conn.Close()
	served := f.session.serveSPDY(p.conn)
	select {
	case <-served:
	case <-f.session.request.Context().Done():
		<-served // the end of the session closes the connection
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
func (p *pairs) accept(stream *spdy.Stream) (spdy.Sink, error) {
	port, err := strconv.ParseUint(stream.Header.Get(portforward.PortHeader), 10, 16)
	if err != nil || port == 0 {
		return nil, fmt.Errorf("header %s: %q is no port", portforward.PortHeader, stream.Header.Get(portforward.PortHeader))
	}
	if err := stream.Reply(); err != nil {
		return nil, err
	}
	one, complete, err := p.add(stream)
	if err != nil {
		writeError(stream, err)
		return nil, err
	}
	if complete {
		p.session.work.Go(func() { p.serve(one, int32(port)) })
	}
	if stream == one.data {
		return one.pod, nil
	}
	return nil, nil // the client only reads it
}

// add finds the pair of a stream, and reports whether it is complete; it is
// counted in open then.
func (p *pairs) add(stream *spdy.Stream) (one *pair, complete bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := requestID(stream)
	one = p.half[id]
	if one == nil {
		if p.count >= maxForwards {
			return nil, false, fmt.Errorf("%d connections of this session are open already", p.count)
		}
		p.count++
		one = &pair{pod: newPodConn(), expire: time.AfterFunc(p.session.server.options.Creation, func() { p.abandon(id) })}
		p.half[id] = one
	}
	if err := one.take(stream); err != nil {
		return nil, false, err
	}
	if one.data == nil || one.errors == nil {
		return one, false, nil
	}
	one.expire.Stop()
	delete(p.half, id)
	p.open.Add(1)
	return one, true, nil
}

func (one *pair) take(stream *spdy.Stream) error {
	kind := stream.Header.Get(portforward.StreamType)
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
func requestID(stream *spdy.Stream) string {
	if id := stream.Header.Get(portforward.PortForwardRequestIDHeader); id != "" {
		return id
	}
	number := stream.ID
	if stream.Header.Get(portforward.StreamType) == portforward.StreamTypeData {
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
		writeError(one.errors, errors.New("the stream for data did not come in time (streaming.creation_timeout)"))
		one.errors.Reset()
	}
	if one.data != nil {
		one.data.Reset()
	}
}

// serve makes the connection of a pair, and says why if it cannot.
func (p *pairs) serve(one *pair, port int32) {
	defer p.open.Done()
	if err := p.connect(port, one.data, one.pod); err != nil {
		writeError(one.errors, err)
	}
	_ = one.errors.Close()
	one.errors.Reset()
	one.data.Reset()
	p.mu.Lock()
	p.count--
	p.mu.Unlock()
}
