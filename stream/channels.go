package stream

import (
	"bufio"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"

	"golang.org/x/net/websocket"

	"github.com/minicri/minicri/stream/spdy"
)

// channelProtocol is what differs between the subprotocols of a WebSocket whose
// messages begin with the number of a channel.
type channelProtocol struct {
	base64    bool // messages are text: a digit, and base64
	status    bool // the last message of exec is a status in JSON, not a text
	halfClose bool // closeSignal and a channel's number close the channel
}

// closeSignal is the channel by which a client closes another one (v5).
const closeSignal = 255

// pieceSize is what is read at once of a message, which may have any length.
const pieceSize = 16 << 10

// channels are those of one WebSocket. The library's own messages are not used
// for reading: it would hold each in memory before it is looked at.
type channels struct {
	ws       *websocket.Conn
	protocol channelProtocol
	// sinks take what the client sends, by channel; nil drops it.
	sinks []sink
	ready chan struct{} // closed when ws is there

	writing sync.Mutex
	message []byte
}

// sink takes what a client sends, as spdy.Sink does.
type sink interface {
	io.Writer
	CloseWrite()
	Abort()
}

// openChannels upgrades to a WebSocket and serves it as work of the session. A
// client that is refused has got its answer.
func (s *session) openChannels(u *upgrade, protocols map[string]channelProtocol, sinks []sink) (*channels, error) {
	conn, buffer, err := u.Hijack()
	if err != nil {
		http.Error(u, err.Error(), http.StatusBadRequest)
		return nil, err
	}
	c := &channels{sinks: sinks, ready: make(chan struct{})}
	server := websocket.Server{
		Handshake: func(config *websocket.Config, _ *http.Request) error { return c.choose(config, protocols) },
		Handler:   c.serve,
	}
	ended := make(chan struct{})
	s.work.Go(func() {
		defer close(ended)
		server.ServeHTTP(hijacked{u, conn, buffer}, s.request)
	})
	select {
	case <-c.ready:
		return c, nil
	case <-ended:
		return nil, errors.New("no WebSocket")
	}
}

// hijacked is a response whose connection is there already.
type hijacked struct {
	http.ResponseWriter
	conn   net.Conn
	buffer *bufio.ReadWriter
}

// Hijack implements http.Hijacker.
func (h hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) { return h.conn, h.buffer, nil }

// choose takes the first of the client's subprotocols that is served. A client
// may ask for none.
func (c *channels) choose(config *websocket.Config, protocols map[string]channelProtocol) (err error) {
	wanted := config.Protocol
	if len(wanted) == 0 {
		wanted = []string{""}
	}
	for _, name := range wanted {
		protocol, served := protocols[name]
		if !served {
			continue
		}
		c.protocol = protocol
		if config.Protocol = nil; name != "" {
			config.Protocol = []string{name}
		}
		return nil
	}
	return fmt.Errorf("none of the protocols %q is served", wanted)
}

// serve reads the connection to its end.
func (c *channels) serve(ws *websocket.Conn) {
	c.ws = ws
	close(c.ready)
	defer c.closeSinks()
	current := sink(nil)
	var pace spdy.Pace
	for {
		frame, err := ws.NewFrameReader()
		if err != nil {
			return // the client has left
		}
		pace.Took(frame.Len())
		continued := frame.PayloadType() == websocket.ContinuationFrame
		if frame, err = ws.HandleFrame(frame); err != nil {
			return
		}
		if frame == nil {
			continue // it was a ping or pong
		}
		if !continued {
			if current, err = c.begin(frame); err != nil {
				return
			}
		}
		if current != nil {
			c.pass(current, frame)
		}
		if _, err := io.Copy(io.Discard, frame); err != nil {
			return
		}
	}
}

// begin reads the number of a message's channel. The sink is nil for a message
// that is not wanted; an error ends the connection.
func (c *channels) begin(frame io.Reader) (sink, error) {
	var number [1]byte
	if _, err := io.ReadFull(frame, number[:]); err != nil {
		return nil, nil // it is empty
	}
	channel := int(number[0])
	if c.protocol.halfClose && channel == closeSignal {
		if _, err := io.ReadFull(frame, number[:]); err != nil || int(number[0]) >= len(c.sinks) {
			return nil, fmt.Errorf("close of channel %d, which is not there", number[0])
		}
		if closed := c.sinks[number[0]]; closed != nil {
			closed.CloseWrite()
		}
		return nil, nil
	}
	if c.protocol.base64 {
		channel -= '0'
	}
	if channel < 0 || channel >= len(c.sinks) {
		return nil, nil
	}
	return c.sinks[channel], nil
}

// pass hands a frame to a sink in pieces.
func (c *channels) pass(to sink, frame io.Reader) {
	if c.protocol.base64 {
		frame = base64.NewDecoder(base64.StdEncoding, frame)
	}
	piece := pieces.Get().(*[pieceSize]byte)
	defer pieces.Put(piece)
	for {
		n, err := frame.Read(piece[:])
		if n > 0 {
			if _, err := to.Write(piece[:n]); err != nil {
				return // the rest is dropped
			}
		}
		if err != nil {
			return
		}
	}
}

// pieces are buffers for pass, shared so that a silent connection has none.
var pieces = sync.Pool{New: func() any { return new([pieceSize]byte) }}

func (c *channels) closeSinks() {
	for _, one := range c.sinks {
		if one != nil {
			one.CloseWrite()
		}
	}
}

// write sends a message.
func (c *channels) write(channel byte, p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	var err error
	if c.protocol.base64 {
		c.message = base64.StdEncoding.AppendEncode(append(c.message[:0], '0'+channel), p)
		err = websocket.Message.Send(c.ws, string(c.message))
	} else {
		c.message = append(append(c.message[:0], channel), p...)
		err = websocket.Message.Send(c.ws, c.message)
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func (c *channels) close() { _ = c.ws.Close() }

// writer is a channel that the client reads.
func (c *channels) writer(channel byte) io.WriteCloser { return channelWriter{c, channel} }

type channelWriter struct {
	channels *channels
	channel  byte
}

// Write implements io.Writer.
func (w channelWriter) Write(p []byte) (int, error) { return w.channels.write(w.channel, p) }

// Close implements io.Closer. A server cannot close a channel alone.
func (w channelWriter) Close() error { return nil }
