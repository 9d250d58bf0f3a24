package supervisor

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	pumpBuffer = 64 << 10 // what a pipe holds
	// drainPause is how long an empty pipe must stay empty, after the process
	// that we wait for has ended, to be taken for the end: a background child
	// may keep it open for ever.
	drainPause = 5 * time.Millisecond
)

// pump moves one output stream of a process to its sinks.
type pump struct {
	source *os.File
	emit   func([]byte) // must not keep the slice
	done   chan struct{}

	endOnce sync.Once
}

func newPump(source *os.File, emit func([]byte)) *pump {
	return &pump{source: source, emit: emit, done: make(chan struct{})}
}

// run moves bytes until the end of the stream, or until the process has ended
// and the pipe is empty. It closes the source.
func (p *pump) run() {
	defer close(p.done)
	defer p.source.Close()
	for {
		n, err := p.pass()
		if n > 0 && err == nil {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && p.pending() {
			_ = p.source.SetReadDeadline(time.Now().Add(drainPause))
			continue
		}
		return // the end, EIO from a terminal without users included
	}
}

// buffers are shared by all pumps, so that a stream that is silent holds none.
var buffers = sync.Pool{New: func() any { return new([pumpBuffer]byte) }}

// pass waits for bytes and moves what one read gives.
func (p *pump) pass() (int, error) {
	if err := p.await(); err != nil {
		return 0, err
	}
	buffer := buffers.Get().(*[pumpBuffer]byte)
	defer buffers.Put(buffer)
	n, err := p.source.Read(buffer[:])
	if n > 0 {
		p.emit(buffer[:n])
	}
	return n, err
}

// await returns when the source has bytes or has ended.
func (p *pump) await() error {
	raw, err := p.source.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		return n > 0 || err != nil
	})
}

// finish says that the process has ended: what is in the pipe still counts.
func (p *pump) finish() {
	p.endOnce.Do(func() {
		_ = p.source.SetReadDeadline(time.Now().Add(drainPause))
	})
}

// pending tells whether bytes wait in the pipe or terminal.
func (p *pump) pending() bool {
	raw, err := p.source.SyscallConn()
	if err != nil {
		return false
	}
	waiting := 0
	err = raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return err == nil && waiting > 0
}
