package stdio

import (
	"errors"
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
// it by the time that it is at the barrier. Who sends it may be a program of the
// node's administrator: what is not one master of a pseudo-terminal is refused.
func ReceiveMaster(socket *os.File) (*os.File, error) {
	// There is room for a second descriptor, so two are seen to be no one.
	name, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(2*4))
	_, n, _, _, err := unix.Recvmsg(int(socket.Fd()), name, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	if err != nil {
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	fds, err := descriptors(oob[:n])
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

// descriptors are those of control messages, also of ones that are not understood as a
// whole.
func descriptors(control []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	for _, message := range messages {
		more, e := unix.ParseUnixRights(&message)
		fds, err = append(fds, more...), errors.Join(err, e)
	}
	return fds, err
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
