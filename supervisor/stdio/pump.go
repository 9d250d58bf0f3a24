package stdio

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
	// may keep it open forever.
	drainPause = 5 * time.Millisecond
	// openInterval is between two tries to open a source, lateLimit how long it is
	// tried when the process has ended.
	openInterval = 250 * time.Millisecond
	lateLimit    = 10 * time.Second
)

// Pump moves one output stream of a process to its sinks, in a goroutine that
// its owner starts by Run. It owns the source.
type Pump struct {
	open   func() (*os.File, error) // of a source that could not be opened yet
	memory memory
	emit   func([]byte)
	done   chan struct{}

	mu               sync.Mutex
	source           *os.File // nil while it cannot be opened
	finished, closed chan struct{}
}

// memory is what a pump reads into: take gives it, for as many bytes as wait,
// have is called with how many came, and moved after they were moved.
type memory interface {
	take(pending int) []byte
	have(n int)
	moved()
}

// newPump moves what comes from source to emit, which must not keep the slice.
func (s *Shared) newPump(source *os.File, emit func([]byte)) *Pump {
	return newPump(source, &chunk{of: s}, emit)
}

func newPump(source *os.File, memory memory, emit func([]byte)) *Pump {
	return &Pump{source: source, memory: memory, emit: emit, done: make(chan struct{}), finished: make(chan struct{}), closed: make(chan struct{})}
}

// Done is closed when all bytes are moved.
func (p *Pump) Done() <-chan struct{} { return p.done }

// Source is what is read from, nil while it cannot be opened.
func (p *Pump) Source() *os.File {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.source
}

// Close closes the source, which ends Run at once.
func (p *Pump) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !isClosed(p.closed) {
		close(p.closed)
	}
	if p.source == nil {
		return nil
	}
	return p.source.Close()
}

// Run moves bytes until the end of the stream, or until the process has ended
// and the pipe is empty. It closes the source.
func (p *Pump) Run() {
	defer close(p.done)
	if !p.awaitSource() {
		return
	}
	defer p.source.Close()
	for {
		n, err := p.pass()
		if n > 0 && err == nil || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && p.pending() {
			_ = p.source.SetReadDeadline(time.Now().Add(drainPause))
			continue
		}
		return // the end, EIO from a terminal without users included
	}
}

// awaitSource opens the source if that was not possible yet. It reports false if the
// pump is closed first, or the process ended long ago.
func (p *Pump) awaitSource() bool {
	finished, late := p.finished, (<-chan time.Time)(nil)
	for p.Source() == nil {
		if source, err := p.open(); err == nil {
			return p.setSource(source)
		}
		select {
		case <-p.closed:
			return false
		case <-late:
			return false
		case <-finished:
			finished, late = nil, time.After(lateLimit)
		case <-time.After(openInterval):
		}
	}
	return true
}

func (p *Pump) setSource(source *os.File) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.closed) {
		_ = source.Close()
		return false
	}
	p.source = source
	if isClosed(p.finished) {
		_ = source.SetReadDeadline(time.Now().Add(drainPause))
	}
	return true
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// pass waits for bytes and moves what one read gives.
func (p *Pump) pass() (int, error) {
	if err := p.await(); err != nil {
		return 0, err
	}
	buffer := p.memory.take(p.waiting())
	defer p.memory.moved()
	n, err := p.read(buffer)
	p.memory.have(max(n, 0))
	if n > 0 {
		p.emit(buffer[:n])
	}
	return n, err
}

// read reads what is there and does not wait, which would hold up the callers that
// wait for this move to end: a container that can read its own output may have done
// so, and then there is EAGAIN.
func (p *Pump) read(buffer []byte) (n int, err error) {
	raw, err := p.source.SyscallConn()
	if err != nil {
		return 0, err
	}
	waitErr := raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), buffer)
		return true
	})
	switch {
	case waitErr != nil:
		return 0, waitErr
	case errors.Is(err, unix.EINTR):
		return 0, unix.EAGAIN
	}
	return max(n, 0), err
}

// await returns when the source has bytes or has ended.
func (p *Pump) await() error {
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

// Finish says that the process has ended: what is in the pipe still counts.
func (p *Pump) Finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.finished) {
		return
	}
	close(p.finished)
	if p.source != nil {
		_ = p.source.SetReadDeadline(time.Now().Add(drainPause))
	}
}

// pending reports whether bytes wait in the pipe or terminal.
func (p *Pump) pending() bool { return p.waiting() > 0 }

// waiting is how many bytes wait.
func (p *Pump) waiting() int {
	raw, err := p.source.SyscallConn()
	if err != nil {
		return 0
	}
	waiting := 0
	err = raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	if err != nil {
		return 0
	}
	return waiting
}
