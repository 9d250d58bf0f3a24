package stdio

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"
)

// Spares hold a read end of each output of a pod's containers, spare ones from
// which is never read: a container that writes while its supervisor and the daemon
// are both dead meets no SIGPIPE, and its next supervisor finds what it wrote; and a
// pidfd of its init, by which the kernel says how that has ended meanwhile. They
// are on their way in a pair of sockets (SCM_RIGHTS of unix(7)) whose two ends are
// stdin and stdout of the pod's pause, which knows nothing of that: what is on its
// way in a socket lives as long as the socket.
type Spares struct{ Receive, Send *os.File }

// NewSpares makes the sockets for a pause that is started and has the SELinux label, ""
// for none. They get it, too: as the program is executed SELinux takes away what its
// domain may not use, and with it all that waits.
func NewSpares(domain string) (Spares, error) {
	var fds [2]int
	err := labellingSockets(domain, func() (err error) {
		fds, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		return os.NewSyscallError("socketpair", err)
	})
	if err != nil {
		return Spares{}, fmt.Errorf("sockets for spare descriptors: %w", err)
	}
	// Two messages for each container: as much as is allowed, twice the usual (socket(7)).
	_ = unix.SetsockoptInt(fds[1], unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
	return Spares{Receive: os.NewFile(uintptr(fds[0]), "spares"), Send: os.NewFile(uintptr(fds[1]), "spares")}, nil
}

// labellingSockets calls do, whose sockets get the SELinux label, unless it is "". The
// kernel keeps for each thread which label that is: one that keeps it ends.
func labellingSockets(domain string, do func() error) (err error) {
	if domain == "" {
		return do()
	}
	runtime.LockOSThread()
	defer func() {
		reset := selinux.SetSocketLabel("")
		if reset == nil {
			runtime.UnlockOSThread()
		}
		err = errors.Join(err, reset)
	}()
	if err := selinux.SetSocketLabel(domain); err != nil {
		return fmt.Errorf("label %q: %w", domain, err)
	}
	return do()
}

// Close closes our copies.
func (s Spares) Close() { closeAll(s.Receive, s.Send) }

// spareSize is that of each message, a container's id: their number is how many
// bytes wait.
const spareSize = 128

// Keep adds copies of a container's outputs, or of its pidfd.
func (s Spares) Keep(id string, outputs ...*os.File) error {
	fds := make([]int, 0, len(outputs))
	for _, output := range outputs {
		fd, err := descriptor(output)
		if err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	if err := s.send(id, fds); err != nil {
		return fmt.Errorf("keep spare descriptors of the output of %s: %w", id, err)
	}
	return nil
}

func (s Spares) send(id string, fds []int) error {
	if len(id) > spareSize {
		return unix.EMSGSIZE
	}
	message := make([]byte, spareSize)
	copy(message, id)
	return os.NewSyscallError("sendmsg", unix.Sendmsg(int(s.Send.Fd()), message, unix.UnixRights(fds...), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL))
}

// Release takes a container's out; none is no error.
func (s Spares) Release(id string) error {
	return s.each(func(owner string, _ []int) (keep bool) { return owner != id })
}

// Find calls found with the descriptors of a container, which are closed after that.
func (s Spares) Find(id string, found func(fd int)) error {
	return s.each(func(owner string, fds []int) (keep bool) {
		if owner == id {
			for _, fd := range fds {
				found(fd)
			}
		}
		return true
	})
}

// each looks at all, and takes those out that look does not keep. Each of the others is
// sent again before the first copy of it is taken out, so that a supervisor that dies
// here leaves one twice and none not at all.
func (s Spares) each(look func(owner string, fds []int) (keep bool)) error {
	waiting, err := unix.IoctlGetInt(int(s.Receive.Fd()), unix.TIOCINQ)
	if err != nil {
		return fmt.Errorf("spare descriptors: %w", os.NewSyscallError("ioctl", err))
	}
	var errs []error
	for range waiting / spareSize {
		owner, fds, err := s.receive(unix.MSG_PEEK)
		if err == nil && look(owner, fds) {
			err = s.send(owner, fds)
		}
		closeDescriptors(fds)
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("spare descriptors: %w", err))...)
		}
		_, fds, err = s.receive(0)
		closeDescriptors(fds)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// descriptor is the number of a file that stays in Go's poller, out of which
// os.File.Fd may take it.
func descriptor(file *os.File) (number int, err error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return 0, err
	}
	err = raw.Control(func(fd uintptr) { number = int(fd) })
	return number, err
}

// receive returns the message at the head.
func (s Spares) receive(flags int) (id string, fds []int, err error) {
	message, oob := make([]byte, spareSize), make([]byte, unix.CmsgSpace(2*4))
	n, oobn, _, _, err := unix.Recvmsg(int(s.Receive.Fd()), message, oob, flags|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return "", nil, os.NewSyscallError("recvmsg", err)
	}
	controls, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return "", nil, err
	}
	for _, control := range controls {
		if more, err := unix.ParseUnixRights(&control); err == nil {
			fds = append(fds, more...)
		}
	}
	return string(bytes.TrimRight(message[:n], "\x00")), fds, nil
}

func closeDescriptors(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
