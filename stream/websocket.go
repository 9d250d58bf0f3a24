package stream

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/websocket"

	"github.com/minicri/minicri/stream/spdy"
)

// channelProtocol is a subprotocol of a WebSocket whose messages begin with a channel's number.
type channelProtocol struct {
	base64    bool // messages are text: a digit, and base64
	status    bool // the last message of exec is a status in JSON, not a text
	halfClose bool // closeSignal and a channel's number close the channel
}

// channels are those of a WebSocket, read by frames: the library holds a whole message in memory.
type channels struct {
	ws       *websocket.Conn
	protocol channelProtocol
	sinks    []spdy.Sink // take what the client sends, by channel; nil drops it
	writing  sync.Mutex
	message  []byte // of writing
}

// serveChannels upgrades with the first subprotocol that is served, or none, and serves during run.
func (s *session) serveChannels(served func(name string) (channelProtocol, bool), sinks []spdy.Sink, run func(*channels)) {
	c := &channels{sinks: sinks}
	choose := func(config *websocket.Config, _ *http.Request) (err error) {
		wanted := config.Protocol
		if len(wanted) == 0 {
			wanted = []string{""}
		}
		for _, name := range wanted {
			if protocol, known := served(name); known {
				c.protocol = protocol
				if config.Protocol = nil; name != "" {
					config.Protocol = []string{name}
				}
				return nil
			}
		}
		return fmt.Errorf("none of the protocols %q is served", wanted)
	}
	websocket.Server{Handshake: choose, Handler: func(ws *websocket.Conn) {
		defer ws.Close()
		c.ws = ws
		s.work.Go(func() {
			c.serve()
			time.AfterFunc(lingerTime, s.lost) // also of a client that says close and keeps its connection
		})
		run(c)
	}}.ServeHTTP(s, s.request)
}

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

// begin reads a message's channel, and returns its sink, or nil to drop the message.
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

// pass hands a frame to a sink in pieces, as they arrive.
func (c *channels) pass(to spdy.Sink, frame io.Reader) {
	if c.protocol.base64 {
		frame = base64.NewDecoder(base64.StdEncoding, frame)
	}
	piece := pieces.Get().(*[pieceSize]byte)
	defer pieces.Put(piece)
	// The wrappers hide other methods, so that a piece is what has arrived. What is not taken is dropped.
	_, _ = io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{frame}, piece[:])
}

const pieceSize = 16 << 10

// pieces are buffers for pass. They are shared, so that a silent connection holds none.
var pieces = sync.Pool{New: func() any { return new([pieceSize]byte) }}

type channelWriter struct {
	channels *channels
	channel  byte
}

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

// Close does nothing: a server cannot close a single channel.
func (w channelWriter) Close() error { return nil }
