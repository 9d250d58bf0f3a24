package spdy

import (
	"encoding/binary"
	"errors"
	"net/http"
	"sync/atomic"
)

// ErrFinished is that of writing to a stream that was closed or reset.
var ErrFinished = errors.New("the stream is closed")

// Stream is one that the client has opened. Its methods may be called by many
// goroutines.
type Stream struct {
	// ID is its number, higher than those of the streams before.
	ID uint32
	// Header is what the client says of it.
	Header http.Header

	conn *Conn
	sink Sink
	// received: the client sends no more; of Serve alone.
	received bool
	// finished: nothing more is sent to the client.
	finished atomic.Bool
}

// Reply accepts the stream.
func (s *Stream) Reply() error {
	c := s.conn
	c.writing.Lock()
	first := !c.replied
	c.replied = true
	c.writing.Unlock()
	// Only Serve replies, so replies are written in the order of this.
	return c.writeControl(typeSynReply, 0, append(binary.BigEndian.AppendUint32(nil, s.ID), emptyHeaders(first)...))
}

// Write sends data to the client.
func (s *Stream) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		if s.finished.Load() {
			return n, ErrFinished
		}
		piece := p[:min(len(p), largestData)]
		if err := s.conn.write(s.ID, 0, piece); err != nil {
			return n, err
		}
		n += len(piece)
		p = p[len(piece):]
	}
	return n, nil
}

// Close says that nothing more is written.
func (s *Stream) Close() error {
	if s.finished.Swap(true) {
		return nil
	}
	return s.conn.write(s.ID, flagFin, nil)
}

// Reset ends the stream in both directions. What the client sends from now on is
// dropped.
func (s *Stream) Reset() {
	s.conn.remove(s.ID)
	if s.finished.Swap(true) {
		return // the client knows that nothing more comes
	}
	payload := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, s.ID), statusCancel)
	_ = s.conn.writeControl(typeRstStream, 0, payload) // fails if the client has left
}

// closeReceived handles the end of what the client sends.
func (s *Stream) closeReceived() {
	if s.received {
		return
	}
	s.received = true
	if s.sink != nil {
		s.sink.CloseWrite()
	}
}
