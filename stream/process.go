package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/supervisor/api"
)

// copyBuffer is what a pipe holds, and the most that the supervisor sends at once.
const copyBuffer = 64 << 10

// link is a process and the connections to its streams.
type link struct {
	process *container.Process
	conns   map[string]*net.UnixConn
	// delivered waits for all outputs.
	delivered sync.WaitGroup
}

// connect opens all outputs, also those that the client did not ask for: a process whose
// output is not read stops.
func connect(ctx context.Context, process *container.Process, stdin bool) (*link, error) {
	l := &link{process: process, conns: make(map[string]*net.UnixConn)}
	names := process.Outputs
	if stdin && process.Stdin {
		names = append([]string{api.Stdin}, names...)
	}
	for _, name := range names {
		conn, err := process.Stream(ctx, name)
		if err != nil {
			l.close()
			return nil, err
		}
		l.conns[name] = conn
	}
	return l, nil
}

func (l *link) close() {
	for _, conn := range l.conns {
		_ = conn.Close()
	}
}

// run copies until the outputs end or ctx does. The goroutines that read from
// the client end with its connection; work counts them.
func (l *link) run(ctx context.Context, streams clientStreams, work *sync.WaitGroup) {
	stop := context.AfterFunc(ctx, l.close)
	defer stop()
	if streams.stdin != nil {
		work.Go(func() { l.feed(streams.stdin) })
	}
	if streams.size != nil {
		work.Go(func() { l.resize(ctx, streams.size) })
	}
	for _, name := range l.process.Outputs {
		to := streams.stdout
		if name == api.Stderr {
			to = streams.stderr
		}
		l.delivered.Go(func() { l.deliver(name, to) })
	}
	l.delivered.Wait()
}

// feed copies stdin. A process that reads no more, or has none, must not hold
// up what else comes over the connection.
func (l *link) feed(from io.Reader) {
	if conn := l.conns[api.Stdin]; conn != nil {
		if err := transfer(conn, from); err == nil {
			_ = conn.CloseWrite() // fails if the process has ended
		} else {
			_ = conn.Close()
		}
	}
	_, _ = io.Copy(io.Discard, from)
}

func (l *link) deliver(name string, to io.WriteCloser) {
	conn := l.conns[name]
	if to == nil {
		_, _ = io.Copy(io.Discard, conn)
		return
	}
	if err := transfer(to, conn); err != nil {
		_ = conn.Close() // the process gets SIGPIPE, as from a shell's reader
		return
	}
	_ = to.Close()
}

// resize passes sizes on, one in a while. One that comes too late for the process is
// no error.
func (l *link) resize(ctx context.Context, sizes <-chan remotecommand.TerminalSize) {
	for size := range sizes {
		if size.Width > 0 && size.Height > 0 {
			_ = l.process.Resize(ctx, uint32(size.Width), uint32(size.Height))
			wait(ctx, resizeEvery)
		}
	}
}

// transfer is io.Copy with a buffer of our size: without, it is half of what
// the other side sends at once.
func transfer(to io.Writer, from io.Reader) error {
	buffer := make([]byte, copyBuffer)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// input is a sink that is read. It holds nothing: what is not read holds
// up its connection.
type input struct {
	reader *io.PipeReader
	writer *io.PipeWriter
}

// newInput makes an input that ends with the session.
func (s *session) newInput() *input {
	reader, writer := io.Pipe()
	context.AfterFunc(s.request.Context(), func() { _ = reader.CloseWithError(s.request.Context().Err()) })
	return &input{reader: reader, writer: writer}
}

// Write implements sink.
func (i *input) Write(p []byte) (int, error) { return i.writer.Write(p) }

// CloseWrite implements sink.
func (i *input) CloseWrite() { _ = i.writer.Close() }

// Abort implements sink.
func (i *input) Abort() { _ = i.writer.Close() }

const (
	// resizeEvery is how often the size of a terminal is set. The last one counts.
	resizeEvery = 500 * time.Millisecond
	// maxSizes is how many bytes of sizes are read in that time: a thousand sizes. A
	// person who drags a window sends some ten.
	maxSizes = 64 << 10
	// largestSize is much longer than a size in JSON.
	largestSize = 1 << 10
)

// sizes has the last size of the client's terminal that was not taken yet, until the
// connection ends. A client that sends faster than anybody can is held up.
func (s *session) sizes(from io.Reader) <-chan remotecommand.TerminalSize {
	sizes := make(chan remotecommand.TerminalSize, 1)
	s.work.Go(func() {
		defer close(sizes)
		var text []byte
		buffer := make([]byte, 4<<10)
		for began, read := time.Now(), 0; ; {
			n, err := from.Read(buffer)
			var size *remotecommand.TerminalSize
			if size, text = lastSize(append(text, buffer[:n]...)); size != nil {
				select {
				case <-sizes:
				default:
				}
				sizes <- *size
			}
			if err != nil {
				return
			}
			if read += n; read >= maxSizes || time.Since(began) >= resizeEvery {
				if read >= maxSizes {
					wait(s.request.Context(), resizeEvery-time.Since(began))
				}
				began, read = time.Now(), 0
			}
		}
	})
	return sizes
}

// lastSize decodes the last of the sizes, each an object of JSON, that a text ends
// with, nil if there is none. It returns what may be the beginning of the next.
func lastSize(text []byte) (size *remotecommand.TerminalSize, rest []byte) {
	end := bytes.LastIndexByte(text, '}')
	if begin := bytes.LastIndexByte(text[:end+1], '{'); begin >= 0 {
		size = new(remotecommand.TerminalSize)
		if json.Unmarshal(text[begin:end+1], size) != nil {
			size = nil
		}
	}
	rest = text[end+1:]
	return size, append(text[:0], rest[max(0, len(rest)-largestSize):]...)
}

// wait returns after a time, or when the context ends.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
