package stdio

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ConsolePair is the socket over which init sends the master of the terminal
// that it made in the container.
func ConsolePair() (ours, inits *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("console socket: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "console"), os.NewFile(uintptr(fds[1]), "console-init"), nil
}

// ReceiveMaster takes the terminal's master out of the socket. Init has sent
// it by the time that it is at the barrier.
func ReceiveMaster(socket *os.File) (*os.File, error) {
	name, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(socket.Fd()), name, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	if err != nil {
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("receive the terminal: %d messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("receive the terminal: %d descriptors: %w", len(fds), err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil { // for deadlines
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
