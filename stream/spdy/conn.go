package spdy

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// The frames of SPDY/3.1 (2.6). A data frame has a stream's number where a
// control frame has its version and type.
const (
	headerSize  = 8
	version     = 3
	controlBit  = 0x80
	lengthMask  = 0xffffff
	streamMask  = 0x7fffffff
	flagFin     = 1
	maxControl  = 16 << 10
	bufferSize  = 32 << 10
	largestData = 64 << 10 // that is sent in one frame

	typeSynStream = 1
	typeSynReply  = 2
	typeRstStream = 3
	typePing      = 6
	typeGoAway    = 7
	typeHeaders   = 8

	statusCancel = 5
)

// Sink takes what the client sends on a stream. Its methods are called by Serve,
// one at a time.
type Sink interface {
	// Write takes a piece. While it waits, nothing of the connection is read. An
	// error resets the stream.
	io.Writer
	// CloseWrite says that the client sends no more on the stream.
	CloseWrite()
	// Abort says that the client has reset the stream.
	Abort()
}

// Conn is the server's side of a connection.
type Conn struct {
	conn    net.Conn
	reader  *bufio.Reader
	headers headerReader
	accept  func(*Stream) (Sink, error)
	last    uint32 // number of the client's last stream

	mu      sync.Mutex
	streams map[uint32]*Stream // that are open; nil after Close

	writing sync.Mutex
	replied bool
}

// NewConn makes a connection. Accept is called for each stream of the client, by
// Serve, and has to call Reply before anything else is written to the stream. A
// stream whose sink is nil is not read; an error refuses it.
func NewConn(conn net.Conn, accept func(*Stream) (Sink, error)) *Conn {
	return &Conn{conn: conn, reader: bufio.NewReaderSize(conn, bufferSize), accept: accept, streams: make(map[uint32]*Stream)}
}

// Serve reads the connection to its end, which is the client's closing it, or
// saying that it goes away. It is an error when the client breaks the protocol.
func (c *Conn) Serve() error {
	defer c.closeSinks()
	var pace Pace
	for {
		header, err := c.reader.Peek(headerSize)
		if err != nil {
			return nil // the client has left
		}
		first, second := binary.BigEndian.Uint32(header), binary.BigEndian.Uint32(header[4:])
		_, _ = c.reader.Discard(headerSize) // is there
		flags, length := byte(second>>24), int(second&lengthMask)
		pace.Took(length)
		if header[0]&controlBit == 0 {
			if err := c.data(first&streamMask, flags, length); err != nil {
				return nil // the client has left
			}
			continue
		}
		if err := c.control(first, flags, length); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("SPDY: %w", err)
		}
	}
}

// data hands the payload of a frame to the sink, in pieces as they arrive.
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
	if stream != nil && flags&flagFin != 0 {
		stream.closeReceived()
	}
	return nil
}

// control handles a control frame; io.EOF ends the connection.
func (c *Conn) control(first uint32, flags byte, length int) error {
	if length > maxControl {
		return fmt.Errorf("a control frame of %d bytes: the limit is %d", length, maxControl)
	}
	if got := first >> 16 & 0x7fff; got != version {
		return fmt.Errorf("version %d, not %d", got, version)
	}
	payload := make([]byte, length)
	if _, err := io.ReadFull(c.reader, payload); err != nil {
		return io.EOF
	}
	kind := first & 0xffff
	if length < leastLength(kind) {
		return fmt.Errorf("a control frame of type %d with %d bytes", kind, length)
	}
	switch kind {
	case typeSynStream:
		return c.open(flags, payload)
	case typeSynReply, typeHeaders:
		_, err := c.headers.read(payload[4:]) // nothing is in them, but they are compressed with the others
		return err
	case typeRstStream:
		c.aborted(binary.BigEndian.Uint32(payload) & streamMask)
	case typePing:
		if payload[3]&1 == 1 { // of the client
			return c.writeControl(typePing, 0, payload[:4])
		}
	case typeGoAway:
		return io.EOF
	}
	return nil // settings, windows and what else there is are not used
}

// leastLength is what a control frame has at least.
func leastLength(kind uint32) int {
	switch kind {
	case typeSynStream:
		return 10
	case typeRstStream:
		return 8
	case typeSynReply, typeHeaders, typePing:
		return 4
	}
	return 0
}

// open handles a new stream.
func (c *Conn) open(flags byte, payload []byte) error {
	id := binary.BigEndian.Uint32(payload) & streamMask
	header, err := c.headers.read(payload[10:])
	if err != nil {
		return fmt.Errorf("headers of stream %d: %w", id, err)
	}
	if id%2 == 0 || id <= c.last {
		return fmt.Errorf("stream %d after stream %d", id, c.last)
	}
	c.last = id
	stream := &Stream{ID: id, Header: header, conn: c}
	if !c.add(stream) {
		return nil // the connection is being closed
	}
	sink, err := c.accept(stream)
	if err != nil {
		stream.Reset()
		return nil
	}
	stream.sink = sink
	if flags&flagFin != 0 {
		stream.closeReceived()
	}
	return nil
}

func (c *Conn) add(stream *Stream) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.streams == nil {
		return false
	}
	c.streams[stream.ID] = stream
	return true
}

func (c *Conn) find(id uint32) *Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams[id]
}

func (c *Conn) remove(id uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.streams, id)
}

// aborted handles the client's reset of a stream.
func (c *Conn) aborted(id uint32) {
	stream := c.find(id)
	if stream == nil {
		return
	}
	c.remove(id)
	stream.finished.Store(true)
	if stream.sink != nil {
		stream.sink.Abort()
	}
}

// all are the open streams.
func (c *Conn) all() (streams []*Stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, stream := range c.streams {
		streams = append(streams, stream)
	}
	return streams
}

// closeSinks says to all sinks that nothing more comes.
func (c *Conn) closeSinks() {
	for _, stream := range c.all() {
		stream.closeReceived()
	}
}

// Close resets all streams, sends GOAWAY and closes the connection.
func (c *Conn) Close() error {
	for _, stream := range c.all() {
		stream.Reset()
	}
	c.mu.Lock()
	closed := c.streams == nil
	c.streams = nil
	c.mu.Unlock()
	if closed {
		return nil
	}
	_ = c.writeControl(typeGoAway, 0, make([]byte, 8)) // fails if the client has left
	return c.conn.Close()
}

// frames are buffers for one frame, shared so that a silent connection has none.
var frames = sync.Pool{New: func() any {
	frame := make([]byte, 0, headerSize+largestData)
	return &frame
}}

// write sends a frame with one call: its parts would be packets of their own.
func (c *Conn) write(first uint32, flags byte, payload []byte) error {
	frame := frames.Get().(*[]byte)
	defer frames.Put(frame)
	b := binary.BigEndian.AppendUint32((*frame)[:0], first)
	b = binary.BigEndian.AppendUint32(b, uint32(flags)<<24|uint32(len(payload)))
	b = append(b, payload...)
	c.writing.Lock()
	defer c.writing.Unlock()
	_, err := c.conn.Write(b)
	return err
}

func (c *Conn) writeControl(kind uint32, flags byte, payload []byte) error {
	return c.write(controlBit<<24|version<<16|kind, flags, payload)
}
