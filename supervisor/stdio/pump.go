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
	memory memory
	emit   func([]byte)
	done   chan struct{}
}

// memory is what a pump reads into: take gives it, for as many bytes as wait,
// have is called with how many came, and moved after they were moved.
type memory interface {
	take(pending int) []byte
	have(n int)
	moved()
}

// newPump moves what comes from source to emit, which must not keep the slice.
func newPump(source *os.File, memory memory, emit func([]byte)) *Pump {
	return &Pump{source: source, memory: memory, emit: emit, done: make(chan struct{})}
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
		err := p.pass()
		if err == nil {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && p.waiting() > 0 {
			p.Finish()
			continue
		}
		return // the end, EIO from a terminal without users included
	}
}

// pass waits for bytes and moves what one read gives.
func (p *Pump) pass() error {
	if err := p.await(); err != nil {
		return err
	}
	buffer := p.memory.take(p.waiting())
	defer p.memory.moved()
	n, err := p.source.Read(buffer) // waits again where another reader was quicker
	p.memory.have(n)
	if n > 0 {
		p.emit(buffer[:n])
	}
	return err
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
func (p *Pump) Finish() { _ = p.source.SetReadDeadline(time.Now().Add(drainPause)) }

// waiting is how many bytes wait.
func (p *Pump) waiting() int {
	waiting := 0
	if raw, err := p.source.SyscallConn(); err == nil { // else it is closed
		_ = raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return waiting
}
