package stream

import (
	"encoding/base64"
	"fmt"
	"io"
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

// pieceSize is what is read at once of a message, which may have any length.
const pieceSize = 16 << 10

// channels are those of one WebSocket. The library's own messages are not used
// for reading: it would hold each in memory before it is looked at.
type channels struct {
	ws       *websocket.Conn
	protocol channelProtocol
	// sinks take what the client sends, by channel; nil drops it.
	sinks []spdy.Sink

	writing sync.Mutex
	message []byte
}

// serveChannels upgrades to a WebSocket, with the first of the client's subprotocols
// that is served, and serves it while run does its work. A client may ask for none.
func (s *session) serveChannels(served func(name string) (channelProtocol, bool), sinks []spdy.Sink, run func(*channels)) {
	c := &channels{sinks: sinks}
	choose := func(config *websocket.Config, _ *http.Request) (err error) {
		wanted := config.Protocol
		if len(wanted) == 0 {
			wanted = []string{""}
		}
		for _, name := range wanted {
			protocol, known := served(name)
			if !known {
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
	websocket.Server{Handshake: choose, Handler: func(ws *websocket.Conn) {
		defer ws.Close() // says so to the client
		c.ws = ws
		s.work.Go(c.serve)
		run(c)
	}}.ServeHTTP(s, s.request)
}

// serve reads the connection to its end.
func (c *channels) serve() {
	defer func() {
		for _, one := range c.sinks {
			if one != nil {
				one.CloseWrite()
			}
		}
	}()
	current := spdy.Sink(nil)
	var pace spdy.Pace
	for {
		frame, err := c.ws.NewFrameReader()
		if err != nil {
			return // the client has left
		}
		pace.Took(frame.Len())
		continued := frame.PayloadType() == websocket.ContinuationFrame
		if frame, err = c.ws.HandleFrame(frame); err != nil {
			return
		}
		if frame == nil {
			continue // it was a ping or pong
		}
		if !continued {
			current = c.begin(frame)
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
// that is not wanted.
func (c *channels) begin(frame io.Reader) spdy.Sink {
	const closeSignal = 255 // by which a client closes another channel (v5)
	number := func() int {
		var b [1]byte
		if _, err := io.ReadFull(frame, b[:]); err != nil {
			return len(c.sinks) // it is empty
		}
		return int(b[0])
	}
	sink := func(channel int) spdy.Sink {
		if channel < 0 || channel >= len(c.sinks) {
			return nil
		}
		return c.sinks[channel]
	}
	channel := number()
	if c.protocol.halfClose && channel == closeSignal {
		if closed := sink(number()); closed != nil {
			closed.CloseWrite()
		}
		return nil
	}
	if c.protocol.base64 {
		channel -= '0'
	}
	return sink(channel)
}

// pass hands a frame to a sink in pieces.
func (c *channels) pass(to spdy.Sink, frame io.Reader) {
	if c.protocol.base64 {
		frame = base64.NewDecoder(base64.StdEncoding, frame)
	}
	piece := pieces.Get().(*[pieceSize]byte)
	defer pieces.Put(piece)
	// What a sink does not take is dropped. The sink has no other methods here: each
	// piece is what has arrived.
	_, _ = io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{frame}, piece[:])
}

// pieces are buffers for pass, shared so that a silent connection has none.
var pieces = sync.Pool{New: func() any { return new([pieceSize]byte) }}

// channelWriter is a channel that the client reads.
type channelWriter struct {
	channels *channels
	channel  byte
}

// Write sends a message.
func (w channelWriter) Write(p []byte) (int, error) {
	c := w.channels
	c.writing.Lock()
	defer c.writing.Unlock()
	var err error
	if c.protocol.base64 {
		c.message = base64.StdEncoding.AppendEncode(append(c.message[:0], '0'+w.channel), p)
		err = websocket.Message.Send(c.ws, string(c.message))
	} else {
		c.message = append(append(c.message[:0], w.channel), p...)
		err = websocket.Message.Send(c.ws, c.message)
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close implements io.Closer. A server cannot close a channel alone.
func (w channelWriter) Close() error { return nil }
