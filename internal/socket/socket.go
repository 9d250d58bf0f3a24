// Package socket makes Unix sockets that only root can connect to, and checks
// before whether a path is free; and pairs of sockets, over which descriptors come. What
// it returns belongs to the caller; it keeps no state and has no locks.
package socket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

var (
	// ErrInUse is the error of a socket that a process listens on.
	ErrInUse = errors.New("another process listens on it")
	// ErrNotSocket is the error of a path at which something else is.
	ErrNotSocket = errors.New("it is there and is not a socket")
)

// CheckFree returns nil if a server may listen at a path: there is nothing, or a
// stale socket on which no process listens any more, which the caller removes.
func CheckFree(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s: %w", path, ErrNotSocket)
	}
	connection, err := net.Dial("unix", path)
	if err == nil {
		_ = connection.Close()
		return fmt.Errorf("%s: %w", path, ErrInUse)
	}
	// Any other error is of one that listens: EAGAIN if its backlog is full,
	// EPROTOTYPE if it takes datagrams (unix(7)).
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrInUse, err)
}

// private are the permissions of a socket that only root can connect to.
const private = 0o600

// ListenPrivate listens at a path that is free, for root alone from the first moment on:
// bind(2) gives the path the mode that the socket has, without the umask's bits.
func ListenPrivate(path string) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		controlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), private) })
		return errors.Join(controlErr, err)
	}}
	listener, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return listener, nil
}

// RootOnly returns a listener that accepts connections of root alone, and of the user
// that this process has, whatever the mode of the path has become. The kernel tells
// who connected (SO_PEERCRED, unix(7)).
func RootOnly(listener net.Listener) net.Listener { return rootOnly{listener} }

type rootOnly struct{ net.Listener }

func (l rootOnly) Accept() (net.Conn, error) {
	for {
		connection, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		var peer *unix.Ucred
		var peerErr error
		raw, err := connection.(*net.UnixConn).SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
		}
		if errors.Join(err, peerErr) == nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid()) {
			return connection, nil
		}
		_ = connection.Close()
	}
}

// Pair returns a connection, and its other end, which is for another process.
func Pair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "socket")
	if ours, err = Conn(os.NewFile(uintptr(fds[0]), "socket")); err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return ours, theirs, nil
}

// Conn makes a connection of the file of a Unix socket, and closes that.
func Conn(file *os.File) (*net.UnixConn, error) {
	connection, err := net.FileConn(file)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	return connection.(*net.UnixConn), nil
}

// Receive fills a buffer with what is sent in one message, and returns the descriptors that
// come with it: as many as there is room for, which are closed on exec; none with an error.
func Receive(connection *net.UnixConn, buffer []byte, room int) (fds []int, err error) {
	control := make([]byte, unix.CmsgSpace(4*room))
	_, n, _, _, err := connection.ReadMsgUnix(buffer, control)
	if err != nil {
		return nil, err
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	for _, message := range messages {
		more, e := unix.ParseUnixRights(&message)
		fds, err = append(fds, more...), errors.Join(err, e)
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return nil, err
	}
	return fds, nil
}
