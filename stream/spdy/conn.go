// Package spdy is the server's side of SPDY/3.1 (draft-mbelshe-httpbis-spdy-00, with the changes
// of 3.1), as far as clients of exec, attach and port-forward use it: only they open streams.
//
// The framer of github.com/moby/spdystream parses control frames. Its connection is not used: it queues up to 250
// frames of 16 MiB each, shares five workers among all streams, and holds a compressor of 0.8 MiB. Here one goroutine
// reads the connection and hands each piece of data to the sink of its stream before it continues. So a connection
// costs its buffer and decompressor, some 100 KiB, whatever the client sends: data frames may have any length,
// control frames at most maxControl, headers at most maxHeaders.
//
// Clients have no flow control for single streams: a sink that waits holds up all streams of its
// connection, for as long as the sink decides.
//
// Conn.writing is held while a frame is written.
package spdy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moby/spdystream/spdy"
)

// SPDY/3.1 (2.6): a data frame begins with a stream's number, a control frame with version and type.
const (
	headerSize  = 8
	control     = 1<<31 | spdy.Version<<16
	lengthMask  = 0xffffff
	streamMask  = 0x7fffffff
	bufferSize  = 32 << 10
	largestData = 64 << 10 // that is sent in one frame
	maxControl  = 16 << 10
	maxHeaders  = 8   // streams of exec and port-forward have three, of some ten bytes
	maxField    = 128 // of a header, decompressed; short, since each NUL in it makes one more string
)

// Sink takes what the client sends on a stream. Serve calls its methods, one at a time.
type Sink interface {
	// Write takes a piece. Until it returns, Serve reads nothing. An error resets the stream.
	io.Writer
	CloseWrite() // the client sends no more on the stream
	Abort()      // the client has reset the stream
}

// Conn is the server's side of a connection.
type Conn struct {
	conn    net.Conn
	reader  *bufio.Reader
	accept  func(*Stream) (Sink, error)
	last    uint32       // number of the client's last stream
	frame   bytes.Buffer // a control frame, which framer parses
	framer  *spdy.Framer
	streams sync.Map // open ones, by number
	writing sync.Mutex
	replied bool
}

// NewConn makes a connection. Serve calls accept for each stream of the client; it has to call Reply
// before the stream is written. A nil sink drops what the client sends; an error refuses the stream.
func NewConn(conn net.Conn, accept func(*Stream) (Sink, error)) *Conn {
	c := &Conn{conn: conn, reader: bufio.NewReaderSize(conn, bufferSize), accept: accept}
	// It fails only for an unknown level of compression.
	c.framer, _ = spdy.NewFramerWithOptions(nil, &c.frame, spdy.WithMaxHeaderCount(maxHeaders), spdy.WithMaxHeaderFieldSize(maxField))
	return c
}

// Serve reads until the client closes the connection, or fails if the client breaks the protocol.
func (c *Conn) Serve() error {
	defer c.each((*Stream).closeReceived)
	var pace Pace
	for {
		header, err := c.reader.Peek(headerSize)
		if err != nil {
			return nil // the client has left
		}
		first, second := binary.BigEndian.Uint32(header), binary.BigEndian.Uint32(header[4:])
		flags, length := byte(second>>24), int(second&lengthMask)
		pace.Took(length)
		if first>>31 == 0 {
			_, _ = c.reader.Discard(headerSize)
			err = c.data(first, flags, length)
		} else if first&^0xffff != control || length > maxControl {
			return fmt.Errorf("SPDY: a control frame %#x of %d bytes: the limit is %d", first, length, maxControl)
		} else if _, err = io.CopyN(&c.frame, c.reader, int64(headerSize+length)); err == nil {
			if err := c.control(); errors.Is(err, errGoAway) {
				return nil
			} else if err != nil {
				return fmt.Errorf("SPDY: %w", err)
			}
		}
		if err != nil {
			return nil // the client has left
		}
	}
}

// data hands the payload of a frame to the sink in pieces, as they arrive.
func (c *Conn) data(id uint32, flags byte, length int) error {
	stream := c.find(id)
	for length > 0 {
		if _, err := c.reader.Peek(1); err != nil {
			return err
		}
		piece, _ := c.reader.Peek(min(length, c.reader.Buffered()))
		if stream != nil && stream.sink != nil && !stream.received {
			if _, err := stream.sink.Write(piece); err != nil {
				stream.Reset()
				stream = nil
			}
		}
		n, _ := c.reader.Discard(len(piece))
		length -= n
	}
	if stream != nil && flags&byte(spdy.DataFlagFin) != 0 {
		stream.closeReceived()
	}
	return nil
}

var errGoAway = errors.New("the client goes away")

func (c *Conn) control() error {
	frame, err := c.framer.ReadFrame()
	c.frame.Reset()
	if err != nil {
		return err
	}
	switch frame := frame.(type) {
	case *spdy.SynStreamFrame:
		return c.open(frame)
	case *spdy.RstStreamFrame:
		if stream := c.find(uint32(frame.StreamId) & streamMask); stream != nil {
			c.streams.Delete(stream.ID)
			stream.finished.Store(true)
			if stream.sink != nil {
				stream.sink.Abort()
			}
		}
	case *spdy.PingFrame:
		if frame.Id&1 == 1 { // of the client
			return c.write(control|uint32(spdy.TypePing), 0, binary.BigEndian.AppendUint32(nil, frame.Id))
		}
	case *spdy.GoAwayFrame:
		return errGoAway
	}
	return nil // settings, windows and others are not used
}

func (c *Conn) open(frame *spdy.SynStreamFrame) error {
	id := uint32(frame.StreamId) & streamMask
	if id%2 == 0 || id <= c.last {
		return fmt.Errorf("stream %d after stream %d", id, c.last)
	}
	c.last = id
	stream := &Stream{ID: id, Header: frame.Headers, conn: c}
	c.streams.Store(id, stream)
	sink, err := c.accept(stream)
	stream.Header = nil
	if err != nil {
		stream.Reset()
		return nil
	}
	stream.sink = sink
	if frame.CFHeader.Flags&spdy.ControlFlagFin != 0 {
		stream.closeReceived()
	}
	return nil
}

// find returns nil for a stream that is not open.
func (c *Conn) find(id uint32) *Stream {
	stream, _ := c.streams.Load(id)
	found, _ := stream.(*Stream)
	return found
}

func (c *Conn) each(do func(*Stream)) {
	c.streams.Range(func(_, stream any) bool {
		do(stream.(*Stream))
		return true
	})
}

// Close resets all streams, sends GOAWAY and closes the connection.
func (c *Conn) Close() error {
	c.each((*Stream).Reset)
	_ = c.write(control|uint32(spdy.TypeGoAway), 0, make([]byte, 8)) // fails if the client has left
	return c.conn.Close()
}

// frames are buffers for one frame. They are shared, so that a silent connection holds none.
var frames = sync.Pool{New: func() any {
	frame := make([]byte, 0, headerSize+largestData)
	return &frame
}}

// write sends a frame with one call, lest its parts become packets of their own.
func (c *Conn) write(first uint32, flags byte, payload []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	frame := frames.Get().(*[]byte)
	defer frames.Put(frame)
	b := binary.BigEndian.AppendUint32((*frame)[:0], first)
	b = binary.BigEndian.AppendUint32(b, uint32(flags)<<24|uint32(len(payload)))
	_, err := c.conn.Write(append(b, payload...))
	return err
}

// ErrFinished is the error of writing to a stream that was closed or reset.
var ErrFinished = errors.New("the stream is closed")

// Stream is one that the client has opened. Many goroutines may call its methods.
type Stream struct {
	ID       uint32      // higher than those of the streams before
	Header   http.Header // nil once accept has returned: a session has many streams
	conn     *Conn
	sink     Sink
	received bool        // the client sends no more; of Serve alone
	finished atomic.Bool // nothing more is sent to the client
}

// Reply accepts the stream. Only the accept of NewConn may call it.
func (s *Stream) Reply() error {
	payload := binary.BigEndian.AppendUint32(nil, s.ID)
	if !s.conn.replied {
		// The header of zlib (RFC 1950, 2.2): deflate, 32 KiB, checksum of SPDY's dictionary.
		payload = append(payload, 0x78, 0xbb, 0xe3, 0xc6, 0xa7, 0xc2)
		s.conn.replied = true
	}
	// No headers, compressed: a stored block of deflate (RFC 1951, 3.2.4) with the number 0, and an
	// empty one, at which decompressors return what they have.
	payload = append(payload, 0, 4, 0, 0xfb, 0xff, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff)
	return s.conn.write(control|uint32(spdy.TypeSynReply), 0, payload)
}

// Write sends data to the client.
func (s *Stream) Write(p []byte) (n int, err error) {
	for piece := range slices.Chunk(p, largestData) {
		if s.finished.Load() {
			return n, ErrFinished
		}
		if err := s.conn.write(s.ID, 0, piece); err != nil {
			return n, err
		}
		n += len(piece)
	}
	return n, nil
}

// Close says that nothing more is written.
func (s *Stream) Close() error {
	if s.finished.Swap(true) {
		return nil
	}
	return s.conn.write(s.ID, byte(spdy.DataFlagFin), nil)
}

// Reset ends the stream in both directions. What the client still sends is dropped.
func (s *Stream) Reset() {
	s.conn.streams.Delete(s.ID)
	if s.finished.Swap(true) {
		return // the client knows that nothing more comes
	}
	payload := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, s.ID), uint32(spdy.Cancel))
	_ = s.conn.write(control|uint32(spdy.TypeRstStream), 0, payload) // fails if the client has left
}

func (s *Stream) closeReceived() {
	if s.sink != nil && !s.received {
		s.sink.CloseWrite()
	}
	s.received = true
}

// At most 16 small frames are taken in a millisecond: each costs as much time as one of 32 KiB.
const (
	burst      = 64
	burstTime  = 4 * time.Millisecond
	burstBytes = burst << 10 // frames with more are not small
)

// Pace slows down the reader of a client that sends small frames without end. Its zero value is ready.
type Pace struct {
	frames, bytes int
	began         time.Time
}

// Took notes a frame, and sleeps if it comes too early. It does not yield instead: the Go scheduler
// would then look for other clients' data only every 10 ms.
func (p *Pace) Took(bytes int) {
	p.frames++
	p.bytes += bytes
	if p.frames < burst {
		return
	}
	if p.bytes < burstBytes {
		time.Sleep(burstTime - time.Since(p.began))
	}
	*p = Pace{began: time.Now()}
}
