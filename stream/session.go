package stream

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/net/websocket"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
	httpspdy "k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/minicri/minicri/stream/spdy"
)

// session is what is done for one client, while its connection lasts.
type session struct {
	server *Server
	// request is the client's; its context ends with the client's connection,
	// with the idle time-out, and with the daemon.
	request *http.Request
	// lost ends that context.
	lost context.CancelFunc
	// patient: what a client has sent before it left still counts.
	patient bool
	// active is when something last passed, in nanoseconds since 1970.
	active atomic.Int64
	// work are the goroutines of the session.
	work sync.WaitGroup
}

// deliveryTime is how long the delivery of what a client had sent before it left
// may take, where it counts.
const deliveryTime = 2 * time.Second

// session serves a request, and returns when nothing of the session is left.
func (s *Server) session(w http.ResponseWriter, r *http.Request, asked request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	quiet := klog.NewContext(ctx, logr.FromSlogHandler(lowered{s.options.Logger.Handler()}))
	one := &session{server: s, request: r.WithContext(quiet), lost: cancel}
	one.touch()
	if !s.requests.begin(one) {
		http.Error(w, "minicri is shutting down", http.StatusServiceUnavailable)
		return
	}
	defer s.requests.end(one)
	u := &upgrade{ResponseWriter: w, session: one}
	if asked.kind == kindPortForward {
		one.patient = true
		one.forward(u, asked)
	} else {
		one.runCommand(u, asked)
	}
	u.end()
	cancel()
	one.work.Wait()
}

// touch notes that something has passed.
func (s *session) touch() { s.active.Store(time.Now().UnixNano()) }

// silence is how long nothing has passed.
func (s *session) silence() time.Duration {
	return time.Duration(time.Now().UnixNano() - s.active.Load())
}

// gone handles the end of what the client sends. The session ends at once, or
// when what has arrived had its time.
func (s *session) gone() {
	if s.patient {
		time.AfterFunc(deliveryTime, s.lost)
		return
	}
	s.lost()
}

// report logs how a session failed, unless its client's leaving is all there
// is to it.
func (s *session) report(what string, err error) {
	if err != nil && s.request.Context().Err() == nil {
		s.server.options.Logger.Warn(what, "err", err)
	}
}

// lowered is a handler for what the libraries say of a session: a client that
// goes away is an error to them and none to the node. What is one, the session
// says itself.
type lowered struct{ slog.Handler }

// Enabled implements slog.Handler.
func (l lowered) Enabled(ctx context.Context, _ slog.Level) bool {
	return l.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle implements slog.Handler.
func (l lowered) Handle(ctx context.Context, r slog.Record) error {
	if !l.Handler.Enabled(ctx, slog.LevelDebug) {
		return nil // logr asks Enabled, except for errors
	}
	r.Level = slog.LevelDebug
	return l.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (l lowered) WithAttrs(attrs []slog.Attr) slog.Handler {
	return lowered{l.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (l lowered) WithGroup(name string) slog.Handler { return lowered{l.Handler.WithGroup(name)} }

// upgradeSPDY makes the HTTP connection one of SPDY, with the first of the
// client's subprotocols that is served. A client that is refused has got its answer.
func (s *session) upgradeSPDY(u *upgrade, protocols ...string) (net.Conn, string, error) {
	r := s.request
	if !httpstream.IsUpgradeRequest(r) || !strings.EqualFold(r.Header.Get(httpstream.HeaderUpgrade), httpspdy.HeaderSpdy31) {
		http.Error(u, "upgrade to SPDY/3.1, or to a WebSocket", http.StatusBadRequest)
		return nil, "", fmt.Errorf("upgrade to %q is not served", r.Header.Get(httpstream.HeaderUpgrade))
	}
	protocol, err := httpstream.Handshake(r, u, protocols)
	if err != nil {
		return nil, "", err
	}
	u.Header().Set(httpstream.HeaderConnection, httpstream.HeaderUpgrade)
	u.Header().Set(httpstream.HeaderUpgrade, httpspdy.HeaderSpdy31)
	u.WriteHeader(http.StatusSwitchingProtocols)
	conn, _, err := u.Hijack()
	return conn, protocol, err
}

// serveSPDY reads a connection to its end, as work of the session. The channel
// is closed then.
func (s *session) serveSPDY(conn *spdy.Conn) <-chan struct{} {
	served := make(chan struct{})
	s.work.Go(func() {
		defer close(served)
		s.report("a client breaks the protocol", conn.Serve())
		s.gone()
	})
	return served
}

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
