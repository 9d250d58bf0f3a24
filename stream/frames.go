package stream

import (
	"encoding/binary"
	"net"
	"sync"
)

const (
	// frameHeader are the bytes before a frame's payload: the last three are
	// its length (SPDY/3.1, 2.2).
	frameHeader = 8
	frameLength = 0xffffff
)

// frames is a connection on which each SPDY frame is one write: the library
// writes the fields of a header one by one, each of which would be a system
// call and a packet of its own. Writes are not concurrent, as the library's
// are not.
type frames struct {
	net.Conn
	pending *[]byte // of a frame that is not complete; nil between two
}

// pendingBuffers are shared, so that a connection that is silent holds none.
var pendingBuffers = sync.Pool{New: func() any {
	buffer := make([]byte, 0, frameHeader+copyBuffer)
	return &buffer
}}

func newFrames(conn net.Conn) *frames { return &frames{Conn: conn} }

// Write implements net.Conn.
func (f *frames) Write(p []byte) (int, error) {
	if f.pending == nil {
		f.pending = pendingBuffers.Get().(*[]byte)
	}
	*f.pending = append(*f.pending, p...)
	if !complete(*f.pending) {
		return len(p), nil
	}
	_, err := f.Conn.Write(*f.pending)
	*f.pending = (*f.pending)[:0]
	pendingBuffers.Put(f.pending)
	f.pending = nil
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func complete(frame []byte) bool {
	return len(frame) >= frameHeader &&
		len(frame) >= frameHeader+int(binary.BigEndian.Uint32(frame[4:])&frameLength)
}
