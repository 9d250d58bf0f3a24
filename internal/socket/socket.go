// Package socket makes Unix sockets that only root can connect to, checks whether their paths are free, and makes
// socket pairs that carry descriptors. The caller owns what it returns; it keeps no state and has no locks.
package socket

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

var (
	// ErrInUse is the error of a socket that a process listens on.
	ErrInUse = errors.New("another process listens on it")
	// ErrNotSocket is the error of a path at which something else is.
	ErrNotSocket = errors.New("it is there and is not a socket")
)

// CheckFree returns nil if a path is free to listen at, or has a stale socket, which the caller removes: nobody
// listens on it, or a process that is doomed.
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
		defer connection.Close()
		if peer, err := Peer(connection.(*net.UnixConn)); err == nil && process.Doomed(int(peer.Pid)) {
			return nil
		}
		return fmt.Errorf("%s: %w", path, ErrInUse)
	}
	// Otherwise one listens: EAGAIN if its backlog is full, EPROTOTYPE for datagrams (unix(7)).
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrInUse, err)
}

// ListenPrivate listens for root alone: bind(2) gives the path the socket's mode, without the umask's bits.
func ListenPrivate(path string) (net.Listener, error) {
	listener, err := listenPrivate(path)
	if err != nil {
		return nil, err
	}
	return Steady(listener), nil
}

func listenPrivate(path string) (*net.UnixListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		controlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(controlErr, err)
	}}
	listener, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return listener.(*net.UnixListener), nil
}

// Replaceable is a listener for root at a path that belongs to another program, which may start later and take the path
// over. Close removes the path only while it is this listener's.
type Replaceable struct {
	net.Listener
	path string
	made os.FileInfo
}

// ListenReplaceable makes a Replaceable, in place of a stale socket. A socket that a process listens on is ErrInUse.
func ListenReplaceable(path string) (*Replaceable, error) {
	if err := CheckFree(path); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := listenPrivate(path)
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	made, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return &Replaceable{Listener: Steady(listener), path: path, made: made}, nil
}

// Owned reports whether clients of the path reach this listener.
func (r *Replaceable) Owned() bool {
	now, err := os.Lstat(r.path)
	return err == nil && os.SameFile(now, r.made)
}

// Close removes the path if it is this listener's, and ends the listener.
func (r *Replaceable) Close() error {
	var err error
	if r.Owned() {
		err = os.Remove(r.path)
	}
	return errors.Join(err, r.Listener.Close())
}

// Steady returns a listener that outlasts errors until it is closed: want of descriptors, or of what the kernel lets
// all processes of root wait for together, which a container can use up (epoll(7), max_user_watches).
func Steady(listener net.Listener) net.Listener { return steady{listener} }

type steady struct{ net.Listener }

func (l steady) Accept() (net.Conn, error) {
	const pause = 10 * time.Millisecond
	for {
		connection, err := l.Listener.Accept()
		if err == nil || errors.Is(err, net.ErrClosed) {
			return connection, err
		}
		time.Sleep(pause)
	}
}

// Peer returns who has made a connection or, to who has, who listens (SO_PEERCRED of unix(7)).
func Peer(connection *net.UnixConn) (peer *unix.Ucred, err error) {
	raw, err := connection.SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return peer, errors.Join(controlErr, err)
}

// RootOnly returns a listener for root and the user of this process.
func RootOnly(listener net.Listener) net.Listener { return rootOnly{listener} }

type rootOnly struct{ net.Listener }

func (l rootOnly) Accept() (net.Conn, error) {
	for {
		connection, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if peer, err := Peer(connection.(*net.UnixConn)); err == nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid()) {
			return connection, nil
		}
		_ = connection.Close()
	}
}

// Pair returns a connection and its other end, which is for another process.
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

// Conn makes a connection from the file of a Unix socket, and closes the file.
func Conn(file *os.File) (*net.UnixConn, error) {
	connection, err := net.FileConn(file)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	return connection.(*net.UnixConn), nil
}

// maxMessage is far above the 6 MiB of arguments and environment that the kernel takes (execve(2)).
const maxMessage = 32 << 20

// SendMessage writes a message: a byte, with the descriptors, and JSON.
func SendMessage(connection *net.UnixConn, message any, files ...*os.File) error {
	content, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(content) > maxMessage {
		return fmt.Errorf("a message of %d bytes is too long: %w", len(content), errdefs.ErrInvalidArgument)
	}
	var fds []int
	for _, file := range files {
		fds = append(fds, int(file.Fd()))
	}
	if _, _, err := connection.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil); err != nil {
		return err
	}
	_, err = connection.Write(content)
	return err
}

// ReceiveMessage reads a message, and returns its descriptors, even after an error. The caller reads what follows from
// rest, which the decoder may have read already.
func ReceiveMessage(connection *net.UnixConn, message any) (files []*os.File, rest *json.Decoder, err error) {
	const maxFiles = 4
	fds, err := Receive(connection, make([]byte, 1), maxFiles)
	if err != nil {
		return nil, nil, err
	}
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "of a message"))
	}
	rest = json.NewDecoder(io.LimitReader(connection, maxMessage))
	return files, rest, rest.Decode(message)
}

// Receive fills a buffer from one message, and returns up to room descriptors in it, closed on exec.
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

// CloseAll closes files that were sent, or are to be; nil ones are none.
func CloseAll(files ...*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
