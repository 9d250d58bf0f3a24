package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"golang.org/x/sys/unix"
)

// taskConsole are the streams of a process in the form that a shim takes: paths that
// it opens. A terminal is made by the shim and stays there, so the shim is given
// one of ours instead, which passes on every byte as it is: what the supervisor
// reads and writes is its master.
type taskConsole struct {
	stdin, stdout, stderr string
	master, terminal      *os.File // nil without a terminal
}

func newTaskConsole(streams Streams) (*taskConsole, error) {
	if !streams.Terminal {
		return &taskConsole{stdin: pathOf(streams.Stdin), stdout: pathOf(streams.Stdout), stderr: pathOf(streams.Stderr)}, nil
	}
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("a terminal for the shim: %w", err)
	}
	c := &taskConsole{master: master}
	if err := c.open(); err != nil {
		c.close()
		return nil, fmt.Errorf("a terminal for the shim: %w", err)
	}
	c.stdin, c.stdout = pathOf(c.terminal), pathOf(c.terminal)
	return c, nil
}

// open opens the other end, ioctl_tty(2), which is named by its descriptor alone:
// /dev/pts may be that of another mount namespace.
func (c *taskConsole) open() error {
	raw, err := c.master.SyscallConn()
	if err != nil {
		return err
	}
	var fd int
	var ioctlErr error
	err = raw.Control(func(master uintptr) {
		if ioctlErr = unix.IoctlSetPointerInt(int(master), unix.TIOCSPTLCK, 0); ioctlErr != nil {
			return
		}
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, master, unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
		if errno != 0 {
			ioctlErr = os.NewSyscallError("ioctl TIOCGPTPEER", errno)
			return
		}
		fd = int(r)
	})
	if err := errors.Join(err, ioctlErr); err != nil {
		return err
	}
	c.terminal = os.NewFile(uintptr(fd), "terminal")
	return makeRaw(fd)
}

// makeRaw is cfmakeraw(3).
func makeRaw(fd int) error {
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return os.NewSyscallError("ioctl TCGETS", err)
	}
	t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	t.Oflag &^= unix.OPOST
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	return os.NewSyscallError("ioctl TCSETS", unix.IoctlSetTermios(fd, unix.TCSETS, t))
}

// take gives away the master; nil without a terminal.
func (c *taskConsole) take() *os.File {
	master := c.master
	c.master = nil
	return master
}

// close closes what was not taken; the shim has opened its own by now.
func (c *taskConsole) close() {
	if c.terminal != nil {
		_ = c.terminal.Close()
	}
	if c.master != nil {
		_ = c.master.Close()
	}
}

// pathOf is where a shim, another process, finds a file of ours; "" for none.
func pathOf(file *os.File) string {
	if file == nil {
		return ""
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), file.Fd())
}

// Relay is of Relayed.
func (c *taskContainer) Relay() *Relay { return c.relay("") }

// relay passes on to the shim, whose descriptors are others than those of the
// process; exec is "" for init.
func (c *taskContainer) relay(exec string) *Relay {
	return &Relay{
		resized: func(width, height uint32) error {
			ctx, cancel := context.WithTimeout(context.Background(), endLimit)
			defer cancel()
			_, err := c.task.ResizePty(ctx, &task.ResizePtyRequest{ID: c.id, ExecID: exec, Width: width, Height: height})
			return taskError("resize", err)
		},
		stdinClosed: func() {
			ctx, cancel := context.WithTimeout(context.Background(), endLimit)
			defer cancel()
			_, _ = c.task.CloseIO(ctx, &task.CloseIORequest{ID: c.id, ExecID: exec, Stdin: true}) // it may have ended
		},
	}
}
