package spdy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moby/spdystream"
	"github.com/moby/spdystream/spdy"

	"github.com/minicri/minicri/test/harness"
)

// recorded is a sink that keeps what it gets.
type recorded struct {
	mu      sync.Mutex
	data    bytes.Buffer
	largest int
	ended   chan string
}

func newRecorded() *recorded { return &recorded{ended: make(chan string, 2)} }

func (r *recorded) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.largest = max(r.largest, len(p))
	return r.data.Write(p)
}
func (r *recorded) CloseWrite() { r.ended <- "closed" }
func (r *recorded) Abort()      { r.ended <- "aborted" }

func (r *recorded) wait(t *testing.T) string {
	t.Helper()
	return <-r.ended
}

// connected are both ends of a TCP connection.
func connected(t *testing.T) (client, server net.Conn) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Check(t, err)
	defer listener.Close()
	client, err = net.Dial("tcp", listener.Addr().String())
	harness.Check(t, err)
	server, err = listener.Accept()
	harness.Check(t, err)
	t.Cleanup(func() {
		client.Close()
		server.Close()
	})
	return client, server
}

// accepted is a stream with its sink.
type accepted struct {
	*Stream
	header http.Header
	sink   *recorded
}

// serving serves one end of a connection, gives its streams, and the other end.
func serving(t *testing.T) (near net.Conn, streams <-chan accepted, served <-chan error) {
	near, far := connected(t)
	list, ended := make(chan accepted, 100), make(chan error, 1)
	c := NewConn(far, func(s *Stream) (Sink, error) {
		if s.Header.Get("streamType") == "bad" {
			return nil, errors.New("refused")
		}
		if err := s.Reply(); err != nil {
			return nil, err
		}
		sink := newRecorded()
		list <- accepted{s, s.Header, sink}
		return sink, nil
	})
	go func() { ended <- c.Serve() }()
	return near, list, ended
}

// The client of kubectl and of the API server is understood, and understands:
// headers in both directions, data, the end of each half, resets, pings.
func TestClientOfKubectl(t *testing.T) {
	near, streams, served := serving(t)
	client, err := spdystream.NewConnection(near, false)
	harness.Check(t, err)
	go client.Serve(func(*spdystream.Stream) {})
	for i := range 20 { // headers are compressed with those before
		opened, err := client.CreateStream(http.Header{"Streamtype": {"data"}, "Port": {fmt.Sprint(i)}}, nil, false)
		harness.Check(t, err)
		harness.Same(t, fmt.Sprintf("stream %d", i), opened.WaitTimeout(time.Minute), nil)
		stream := <-streams
		harness.Want(t, stream.header.Get("streamType") == "data" && stream.header.Get("port") == fmt.Sprint(i),
			"the headers of stream %d are %v", i, stream.header)
		sent := strings.Repeat("hello", 100_000)
		_, err = opened.Write([]byte(sent))
		harness.Check(t, err)
		harness.Check(t, opened.Close())
		if how := stream.sink.wait(t); how != "closed" || stream.sink.data.String() != sent || stream.Header != nil {
			t.Fatalf("%s after %d bytes, with headers %v", how, stream.sink.data.Len(), stream.Header)
		}
		go func() {
			_, _ = stream.Write([]byte(sent))
			_ = stream.Close()
		}()
		back, err := io.ReadAll(opened)
		harness.Want(t, err == nil && string(back) == sent, "back come %d bytes (%v)", len(back), err)
		_, err = stream.Write([]byte("x"))
		harness.Want(t, errors.Is(err, ErrFinished), "after its end a stream can be written: %v", err)
	}
	refused, err := client.CreateStream(http.Header{"Streamtype": {"bad"}}, nil, false)
	harness.Check(t, err)
	err = refused.WaitTimeout(time.Minute)
	harness.Want(t, errors.Is(err, spdystream.ErrReset), "a stream that is refused: %v", err)
	reset, err := client.CreateStream(http.Header{"Streamtype": {"data"}}, nil, false)
	harness.Check(t, err)
	last := <-streams
	harness.Check(t, reset.Reset())
	harness.Same(t, "a reset", last.sink.wait(t), "aborted")
	_, err = client.Ping()
	harness.Want(t, err == nil, "%v", err)
	harness.Check(t, client.Close())
	harness.Check(t, <-served)
}

// frame is one as it is on the wire.
func frame(first uint32, flags byte, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, first)
	b = binary.BigEndian.AppendUint32(b, uint32(flags)<<24|uint32(len(payload)))
	return append(b, payload...)
}

func controlFrame(kind spdy.ControlFrameType, payload []byte) []byte {
	return frame(control|uint32(kind), 0, payload)
}

// A frame of data of any length is handed on in pieces, and control frames are not taken beyond their limit. A stream
// that is refused is not kept.
//
// attack: clients: an exec that reads nothing gets data frames of 16 MiB on all streams, settings of 16 MiB, and endless streams
// held: a session reads pieces of 32 KiB; longer control frames end it, and refused streams cost nothing
// field: spdystream, of containerd and CRI-O too, keeps up to 4 GiB
func TestHostileFrames(t *testing.T) {
	const huge = 1<<24 - 1
	for name, hostile := range harness.Sorted(map[string][]byte{
		"settings of 16 MiB":   controlFrame(4, make([]byte, huge)),
		"a stream of 16 MiB":   controlFrame(spdy.TypeSynStream, make([]byte, huge)),
		"a version":            frame(1<<31|2<<16|6, 0, make([]byte, 4)),
		"headers that are bad": controlFrame(spdy.TypeSynStream, make([]byte, 100)),
		"a short stream":       controlFrame(spdy.TypeSynStream, []byte{0, 0}),
		"a short ping":         controlFrame(spdy.TypePing, nil),
	}) {
		near, _, served := serving(t)
		go func() { _, _ = near.Write(hostile) }()
		harness.Want(t, <-served != nil, "%s is no error", name)
	}
	near, streams, served := serving(t)
	client, err := spdystream.NewConnection(near, false)
	harness.Check(t, err)
	opened, err := client.CreateStream(http.Header{"Streamtype": {"data"}}, nil, false)
	harness.Check(t, err)
	stream := <-streams
	_, err = near.Write(frame(opened.Identifier(), byte(spdy.DataFlagFin), make([]byte, huge)))
	harness.Check(t, err)
	_, err = near.Write(frame(12345, 0, make([]byte, 1<<20))) // of no stream
	harness.Check(t, err)
	if how := stream.sink.wait(t); how != "closed" || stream.sink.data.Len() != huge || stream.sink.largest > bufferSize {
		t.Errorf("%s after %d bytes in pieces of %d", how, stream.sink.data.Len(), stream.sink.largest)
	}
	near.Close()
	harness.Check(t, <-served)

	near, far := connected(t)
	c := NewConn(far, func(*Stream) (Sink, error) { return nil, errors.New("refused") })
	ended := make(chan error, 1)
	go func() { ended <- c.Serve() }()
	client, err = spdystream.NewConnection(near, false)
	harness.Check(t, err)
	go client.Serve(func(*spdystream.Stream) {})
	for range 1000 {
		refused, err := client.CreateStream(http.Header{"Streamtype": {"none"}}, nil, false)
		harness.Check(t, err)
		harness.WantError(t, refused.WaitTimeout(time.Minute))
	}
	c.streams.Range(func(id, _ any) bool {
		t.Errorf("stream %v is kept", id)
		return true
	})
	harness.Check(t, client.Close())
	harness.Check(t, <-ended)
}

// Too many or too long headers, which compress to a few bytes, are refused.
func TestHostileHeaders(t *testing.T) {
	many := http.Header{}
	for i := range maxHeaders + 1 {
		many.Set(fmt.Sprint("x", i), "y")
	}
	for name, header := range harness.Sorted(map[string]http.Header{"many": many, "long": {"X": {strings.Repeat("y", maxField+1)}}}) {
		near, _, served := serving(t)
		client, err := spdystream.NewConnection(near, false)
		harness.Check(t, err)
		_, err = client.CreateStream(header, nil, false)
		harness.Check(t, err)
		harness.Want(t, <-served != nil, "%s headers are taken", name)
	}
}

// discard is a connection that is written to for nothing.
type discard struct {
	net.Conn
	io.Reader
}

func (d discard) Read(p []byte) (int, error)  { return d.Reader.Read(p) }
func (d discard) Write(p []byte) (int, error) { return len(p), nil }
func (d discard) Close() error                { return nil }

// Whatever comes, reading it ends, and no piece is larger than the buffer.
func FuzzServe(f *testing.F) {
	f.Add(controlFrame(spdy.TypePing, []byte{0, 0, 0, 1}))
	f.Add(frame(1, byte(spdy.DataFlagFin), []byte("hello")))
	f.Add(controlFrame(spdy.TypeSynStream, make([]byte, 30)))
	f.Add(controlFrame(spdy.TypeGoAway, make([]byte, 8)))
	f.Fuzz(func(t *testing.T, input []byte) {
		sink := newRecorded()
		sink.ended = make(chan string, 1000)
		c := NewConn(discard{Reader: bytes.NewReader(input)}, func(s *Stream) (Sink, error) { return sink, s.Reply() })
		_ = c.Serve()
		_ = c.Close()
		harness.Want(t, sink.largest <= bufferSize, "a piece of %d bytes", sink.largest)
	})
}

// Small frames wait, large ones do not.
//
// attack: clients: a session sends pings and settings as fast as it can; they cost the most for each byte
// held: minicri reads at most 16 frames per millisecond of it, so other sessions get their share of the processors
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const frames = 4096
		took := func(bytes int) time.Duration {
			var pace Pace
			began := time.Now()
			for range frames {
				pace.Took(bytes)
			}
			return time.Since(began)
		}
		harness.Same(t, "the time of small frames", took(4), (frames/burst-1)*burstTime)
		harness.Same(t, "the time of large frames", took(32<<10), 0)
	})
}
