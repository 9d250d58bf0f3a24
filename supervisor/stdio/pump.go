package stdio

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	pumpBuffer = 64 << 10 // what a pipe holds
	// drainPause is how long an empty pipe must stay empty, after the process
	// that we wait for has ended, to be taken for the end: a background child
	// may keep it open forever.
	drainPause = 5 * time.Millisecond
)

// Pump moves one output stream of a process to its sinks, in a goroutine that
// its owner starts by Run. It owns the source.
type Pump struct {
	source *os.File
	read   func(source *os.File) ([]byte, error) // waits for bytes
	emit   func([]byte)                          // must not keep the slice
	done   chan struct{}
}

func newPump(source *os.File, emit func([]byte)) *Pump {
	return &Pump{source: source, read: readChunk, emit: emit, done: make(chan struct{})}
}

// Done is closed when all bytes are moved.
func (p *Pump) Done() <-chan struct{} { return p.done }

// Close closes the source, which ends Run at once.
func (p *Pump) Close() error { return p.source.Close() }

// Run moves bytes until the end of the stream, or until the process has ended
// and the pipe is empty. It closes the source.
func (p *Pump) Run() {
	defer close(p.done)
	defer p.source.Close()
	for {
		data, err := p.read(p.source)
		if len(data) > 0 {
			p.emit(data)
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && waiting(p.source) > 0:
			p.Finish()
		default:
			return // the end, EIO from a terminal without users included
		}
	}
}

// readChunk reads what waits into memory of its own: a stream that is silent holds none.
func readChunk(source *os.File) ([]byte, error) {
	raw, err := source.SyscallConn()
	if err != nil {
		return nil, err
	}
	err = raw.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		return n > 0 || err != nil
	})
	if err != nil {
		return nil, err
	}
	chunk := make([]byte, min(max(waiting(source), 1), pumpBuffer))
	n, err := source.Read(chunk) // waits again where another reader was quicker
	return chunk[:n], err
}

// Finish says that the process has ended: what is in the pipe still counts.
func (p *Pump) Finish() { _ = p.source.SetReadDeadline(time.Now().Add(drainPause)) }

// waiting is how many bytes wait.
func waiting(source *os.File) (bytes int) {
	if raw, err := source.SyscallConn(); err == nil { // else it is closed
		_ = raw.Control(func(fd uintptr) { bytes, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return bytes
}
