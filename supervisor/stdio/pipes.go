package stdio

import (
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
)

// Pipes are the streams of an exec: each output goes to the client that takes it.
type Pipes struct {
	input                       // its mu guards what follows, too
	outputs map[string]*os.File // read ends that no pump has taken
	pumps   []*Pump
	ended   bool // the process has
}

// OpenPipes makes the streams of an exec without a terminal: of Options it reads Dir, Stdin and SELinux.
func OpenPipes(o Options) (*Pipes, Ends, error) {
	p, ends := NewTerminalPipes(), Ends{}
	var err error
	p.outputs[api.Stdout], ends[1], err = openPipe(o.Dir, o.SELinux)
	if err == nil {
		p.outputs[api.Stderr], ends[2], err = openPipe(o.Dir, o.SELinux)
	}
	if err == nil {
		ends[0], p.stdin, err = openPipe(o.Dir, o.SELinux)
	}
	if err != nil {
		p.Close()
		ends.Close()
		return nil, Ends{}, fmt.Errorf("open pipes: %w", err)
	}
	if !o.Stdin { // it is at its end
		p.CloseStdin()
	}
	return p, ends, nil
}

// NewTerminalPipes are the streams of an exec with a terminal, which TakeTerminal gives.
func NewTerminalPipes() *Pipes {
	return &Pipes{outputs: map[string]*os.File{}}
}

// TakeTerminal makes the master the source of output and the sink of input.
func (p *Pipes) TakeTerminal(master *os.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.take(master)
	p.outputs[api.Stdout] = master
}

// Take makes a pump of an output that has none yet. The caller runs it, and AwaitOutput waits for it.
func (p *Pipes) Take(stream string, emit func([]byte)) (*Pump, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	source := p.outputs[stream]
	if source == nil {
		return nil, fmt.Errorf("stream %s: %w", stream, errdefs.ErrNotFound)
	}
	if err := awaitable(source); err != nil {
		return nil, err
	}
	delete(p.outputs, stream)
	pump := newPump(source, emit)
	p.pumps = append(p.pumps, pump)
	if p.ended {
		pump.Finish()
	}
	return pump, nil
}

// Finish says that the process has ended. What is in the pipes is still delivered.
func (p *Pipes) Finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for _, pump := range p.pumps {
		pump.Finish()
	}
}

// AwaitOutput returns when all that the process wrote is delivered.
func (p *Pipes) AwaitOutput() {
	p.mu.Lock()
	pumps := p.pumps
	p.mu.Unlock()
	for _, pump := range pumps {
		<-pump.Done()
	}
}

// Close closes what is open; pumps end at once.
func (p *Pipes) Close() {
	p.CloseStdin()
	p.hangUp()
	p.mu.Lock()
	defer p.mu.Unlock()
	socket.CloseAll(slices.Collect(maps.Values(p.outputs))...)
	for _, pump := range p.pumps {
		_ = pump.Close()
	}
}

// openPipe is os.Pipe for a container whose files have the SELinux label, "" for none. A pipe has the label
// of its maker, with all categories, and at execve SELinux closes what the container's domain may not use.
// A fifo in dir, which is labelled as a file, takes its place. Its name is gone on return. A name that a killed
// supervisor leaves looks like that of a container without a record, and is removed as such.
func openPipe(dir, selinux string) (r, w *os.File, err error) {
	if selinux == "" {
		return os.Pipe()
	}
	path := fifoPath(dir, "pipe-"+rand.Text(), api.Stdout)
	first, err := makeFifo(path, selinux) // which is non-blocking, and the container would share that
	if err != nil {
		return nil, nil, err
	}
	w, err = reopen(first, os.O_WRONLY)
	if err == nil {
		r, err = reopen(first, os.O_RDONLY)
	}
	socket.CloseAll(first)
	if err = errors.Join(err, os.Remove(path)); err != nil {
		socket.CloseAll(r, w)
		return nil, nil, err
	}
	return r, w, nil
}

// awaitable returns an error for an output that does not fit into epoll(7): nothing would wait for its bytes.
func awaitable(source *os.File) error {
	if err := source.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("wait for output (is /proc/sys/fs/epoll/max_user_watches reached?): %w: %w", errdefs.ErrUnavailable, err)
	}
	return nil
}

// makeFifo makes a fifo and opens it for reading.
func makeFifo(path, selinux string) (*os.File, error) {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, fmt.Errorf("make fifo %s: %w", path, err)
	}
	fifo, err := OpenFifo(path)
	if err == nil {
		err = through(fifo, func(path string) error { return label.SetFileLabel(path, selinux) })
	}
	if err != nil {
		socket.CloseAll(fifo)
		return nil, errors.Join(fmt.Errorf("make fifo %s: %w", path, err), os.Remove(path))
	}
	return fifo, nil
}

// OpenFifo opens a fifo for reading, and nothing else: a container of the pod may have replaced it.
func OpenFifo(path string) (*os.File, error) {
	fifo, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := fifo.Stat()
	if err == nil && info.Mode().Type() != os.ModeNamedPipe {
		err = fmt.Errorf("open fifo %s: it is a %v", path, info.Mode())
	}
	if err != nil {
		socket.CloseAll(fifo)
		return nil, err
	}
	return fifo, nil
}

// reopen opens the same fifo again, whatever has its name now.
func reopen(fifo *os.File, flags int) (opened *os.File, err error) {
	err = through(fifo, func(path string) error {
		opened, err = os.OpenFile(path, flags, 0)
		return err
	})
	return opened, err
}

// through calls do with a path that leads to the open file.
func through(file *os.File, do func(path string) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	controlErr := raw.Control(func(fd uintptr) { err = do(fmt.Sprintf("/proc/self/fd/%d", fd)) })
	return errors.Join(controlErr, err)
}

const pumpBuffer = 64 << 10 // what a pipe holds

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
	pace := pace{since: time.Now()}
	for {
		data, err := p.read(p.source)
		if len(data) > 0 {
			p.emit(data)
			time.Sleep(pace.after(len(data), time.Now()))
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && p.unread():
			p.Finish()
		default:
			return // the end, EIO from a terminal that hangs up included
		}
	}
}

// pace bounds how often a pump moves less than a page, to smallChunks in as many milliseconds: a container that writes
// bytes one by one, or has made its pipe small, must not cost the supervisor more time than itself. Meanwhile the pipe
// fills, so the rate of bytes suffers only where the container has made it small.
type pace struct {
	small int
	since time.Time
}

const smallChunks = 64

// after returns how long to wait after a chunk of n bytes.
func (p *pace) after(n int, now time.Time) time.Duration {
	const page = 4096
	if n >= page {
		return 0
	}
	p.small++
	if p.small < smallChunks {
		return 0
	}
	wait := smallChunks*time.Millisecond - now.Sub(p.since)
	p.small, p.since = 0, now.Add(max(0, wait))
	return max(0, wait)
}

// readChunk reads what waits into memory of its own: a stream that is silent holds none.
func readChunk(source *os.File) ([]byte, error) {
	raw, err := source.SyscallConn()
	if err != nil {
		return nil, err
	}
	if err = raw.Read(func(fd uintptr) bool { return happened(fd, unix.POLLIN) }); err != nil {
		return nil, err
	}
	chunk := make([]byte, min(max(waiting(source), 1), pumpBuffer))
	n, err := source.Read(chunk) // waits again where another reader was quicker
	return chunk[:n], err
}

// emptyLimit is how long a pipe may stay empty after its process has ended.
const emptyLimit = 5 * time.Millisecond

// Finish says that the process has ended. What is in the pipe is still moved. A pipe that stays empty for emptyLimit
// is at its end, because a background child may keep it open forever.
func (p *Pump) Finish() { _ = p.source.SetReadDeadline(time.Now().Add(emptyLimit)) }

// unread reports whether bytes wait, or the end. It polls because TIOCINQ may not count a terminal's last bytes yet,
// which poll(2) has the kernel hand over first.
func (p *Pump) unread() bool { return Polled(p.source, unix.POLLIN) }

// Polled reports whether one of the events of poll(2) has happened to a file, or its other end is gone.
func Polled(file syscall.Conn, events int16) (is bool) {
	if raw, err := file.SyscallConn(); err == nil { // else it is closed
		_ = raw.Control(func(fd uintptr) { is = happened(fd, events) })
	}
	return is
}

func happened(fd uintptr, events int16) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: events}}
	n, err := unix.Poll(poll, 0)
	for err == unix.EINTR {
		n, err = unix.Poll(poll, 0)
	}
	return n > 0 || err != nil
}

func waiting(source *os.File) (bytes int) {
	if raw, err := source.SyscallConn(); err == nil { // else it is closed
		_ = raw.Control(func(fd uintptr) { bytes, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return bytes
}
