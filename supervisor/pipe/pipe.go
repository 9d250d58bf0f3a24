// Package pipe has the standard streams that the daemon and a supervisor share: pipes with a security label, the output
// of a process that has ended, and terminals. The caller owns each returned file. The package keeps no state and has no
// locks.
package pipe

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
)

// Open is os.Pipe for a container whose files have the SELinux label, "" for none. A pipe has the label of its maker,
// with all categories, and execve closes each file that SELinux denies the domain of the container. A fifo in dir takes
// the place of the pipe, because it is labelled as a file. It has no name on return. A successor of the supervisor
// of dir removes a name that a killed process leaves: it looks like a fifo of a container without a record.
func Open(dir, selinux string) (r, w *os.File, err error) {
	if selinux == "" {
		return os.Pipe()
	}
	path := filepath.Join(dir, "pipe-"+rand.Text()+".stdout")
	first, err := MakeFifo(path, selinux) // which is non-blocking, and the container would share that
	if err != nil {
		return nil, nil, err
	}
	w, err = Reopen(first, os.O_WRONLY)
	if err == nil {
		r, err = Reopen(first, os.O_RDONLY)
	}
	socket.CloseAll(first)
	if err = errors.Join(err, os.Remove(path)); err != nil {
		socket.CloseAll(r, w)
		return nil, nil, err
	}
	return r, w, nil
}

// MakeFifo makes a fifo with an SELinux label, "" for none, and opens it for reading.
func MakeFifo(path, selinux string) (*os.File, error) {
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

// Reopen opens the same fifo again, whatever has its name now.
func Reopen(fifo *os.File, flags int) (opened *os.File, err error) {
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

// Awaitable returns an error for an output that does not fit into epoll(7): nothing would wait for its bytes.
func Awaitable(source *os.File) error {
	if err := source.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("wait for output (is /proc/sys/fs/epoll/max_user_watches reached?): %w: %w",
			errdefs.ErrUnavailable, err)
	}
	return nil
}

// Output reads the output of a process until all writers have closed it, or until the process has ended and the pipe
// is empty.
type Output struct {
	*os.File
	pace Pace
	wait time.Duration
}

// NewOutput returns the output that comes from a pipe or from the master of a terminal.
func NewOutput(source *os.File) *Output { return &Output{File: source, pace: NewPace()} }

// Read implements io.Reader. One goroutine at a time may call it.
func (o *Output) Read(b []byte) (n int, err error) {
	time.Sleep(o.wait)
	for n, err = o.File.Read(b); errors.Is(err, os.ErrDeadlineExceeded) && Unread(o.File); n, err = o.File.Read(b) {
		Finish(o.File)
	}
	if n == 0 && err != nil {
		return 0, io.EOF // EIO from a terminal that hangs up included
	}
	o.wait = o.pace.After(n, time.Now())
	return n, nil
}

// emptyLimit is how long a pipe may stay empty after its process has ended.
const emptyLimit = 5 * time.Millisecond

// Finish is for an output whose process has ended. Bytes in the pipe can still be read. A pipe that stays empty for
// emptyLimit is at its end, because a background child may keep it open forever.
func Finish(source *os.File) { _ = source.SetReadDeadline(time.Now().Add(emptyLimit)) }

// Unread reports whether bytes wait, or the end. It polls because TIOCINQ may not count a terminal's last bytes yet:
// poll(2) has the kernel deliver them first.
func Unread(source *os.File) bool { return Polled(source, unix.POLLIN) }

// Polled reports whether one of the events of poll(2) has happened to a file, or its other end was closed.
func Polled(file syscall.Conn, events int16) (is bool) {
	if raw, err := file.SyscallConn(); err == nil { // else the file is closed
		_ = raw.Control(func(fd uintptr) { is = Happened(fd, events) })
	}
	return is
}

// Happened is Polled for a descriptor.
func Happened(fd uintptr, events int16) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: events}}
	n, err := unix.Poll(poll, 0)
	for err == unix.EINTR {
		n, err = unix.Poll(poll, 0)
	}
	return n > 0 || err != nil
}

// Pace bounds how often a reader takes less than a page, to smallChunks in as many milliseconds: a process that writes
// bytes one by one, or has made its pipe small, must not cost the reader more time than itself. Meanwhile the pipe
// fills, so the rate of bytes suffers only where the process has made it small.
type Pace struct {
	small int
	since time.Time
}

const smallChunks = 64

// NewPace returns the pace of a reader that begins now.
func NewPace() Pace { return Pace{since: time.Now()} }

// After returns how long to wait after a chunk of n bytes.
func (p *Pace) After(n int, now time.Time) time.Duration {
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

// OpenSlave opens the slave of a terminal, or returns nil. A supervisor keeps it as long as the process lives: a
// program may close its terminal and open it again, as systemd does with /dev/console for each line, and without a user
// a terminal hangs up. So the process ends the output, not the last user of the terminal.
func OpenSlave(master *os.File) (slave *os.File) {
	raw, err := master.SyscallConn()
	if err != nil {
		return nil // the master is closed
	}
	const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	_ = raw.Control(func(fd uintptr) {
		number, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.TIOCGPTPEER, flags)
		if errno == 0 { // else the file system was unmounted
			slave = os.NewFile(number, "terminal")
		}
	})
	return slave
}

// Resize sets a terminal's size, ioctl_tty(2).
func Resize(master *os.File, width, height uint32) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ioctlErr error
	err = raw.Control(func(fd uintptr) {
		size := &unix.Winsize{Row: uint16(height), Col: uint16(width)}
		ioctlErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, size)
	})
	return errors.Join(err, ioctlErr)
}
