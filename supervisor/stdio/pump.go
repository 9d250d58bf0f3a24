package stdio

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/pipe"
)

const pumpBuffer = 64 << 10 // the size of a pipe

// Pump moves one output stream of a process to its sinks. It owns the source.
type Pump struct {
	source *os.File
	read   func(source *os.File) ([]byte, error) // waits for bytes, and keeps none of them
	emit   func([]byte)                          // may keep the slice, and must not change it
	done   chan struct{}
}

func newPump(source *os.File, emit func([]byte)) *Pump {
	return &Pump{source: source, read: readChunk, emit: emit, done: make(chan struct{})}
}

// Done is closed when all bytes are moved.
func (p *Pump) Done() <-chan struct{} { return p.done }

// Close closes the source, which ends Run at once.
func (p *Pump) Close() error { return p.source.Close() }

// Run moves bytes until the stream ends, or the process has ended and the pipe is empty.
func (p *Pump) Run() {
	defer close(p.done)
	defer p.source.Close()
	pace := pipe.NewPace()
	for {
		data, err := p.read(p.source)
		if len(data) > 0 {
			p.emit(data)
			time.Sleep(pace.After(len(data), time.Now()))
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && pipe.Unread(p.source):
			p.Finish()
		default:
			return // the end, EIO from a terminal that hangs up included
		}
	}
}

// readChunk reads the waiting bytes into new memory: a silent stream keeps none.
func readChunk(source *os.File) ([]byte, error) {
	raw, err := source.SyscallConn()
	if err != nil {
		return nil, err
	}
	if err = raw.Read(func(fd uintptr) bool { return pipe.Happened(fd, unix.POLLIN) }); err != nil {
		return nil, err
	}
	chunk := make([]byte, min(max(waiting(source), 1), pumpBuffer))
	n, err := source.Read(chunk) // waits again where another reader was quicker
	return chunk[:n], err
}

// Finish is for a process that has ended (pipe.Finish).
func (p *Pump) Finish() { pipe.Finish(p.source) }

func waiting(source *os.File) (bytes int) {
	if raw, err := source.SyscallConn(); err == nil { // else it is closed
		_ = raw.Control(func(fd uintptr) { bytes, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return bytes
}
