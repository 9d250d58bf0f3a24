package stdio

import (
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
)

// masterLimit is how long a terminal's master may take that is on its way.
const masterLimit = time.Second

// ReceiveMaster takes the terminal's master out of the socket. Init has sent
// it by the time that it is at the barrier. Who sends it may be a program of the
// node's administrator: what is not one master of a pseudo-terminal is refused.
func ReceiveMaster(from *net.UnixConn) (*os.File, error) {
	if err := from.SetReadDeadline(time.Now().Add(masterLimit)); err != nil {
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	// There is room for a second descriptor, so two are seen to be no one.
	fds, err := socket.Receive(from, make([]byte, 4096), 2)
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("%d descriptors or more were sent, not one", len(fds))
	}
	if err == nil {
		if _, e := unix.IoctlGetUint32(fds[0], unix.TIOCGPTN); e != nil {
			err = fmt.Errorf("what was sent is no master of a pseudo-terminal: %w", os.NewSyscallError("ioctl(TIOCGPTN)", e))
		}
	}
	if err == nil {
		err = os.NewSyscallError("fcntl", unix.SetNonblock(fds[0], true)) // for deadlines
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "terminal"), nil
}

// Resize sets a terminal's size, ioctl_tty(2).
func Resize(master *os.File, width, height uint32) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ioctlErr error
	err = raw.Control(func(fd uintptr) {
		ioctlErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(height), Col: uint16(width)})
	})
	if err != nil {
		return err
	}
	return ioctlErr
}
