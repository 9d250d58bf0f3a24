package runtime

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/runtime/launch"
)

// withFiles opens what the process gets, calls do with our end of the socket, and
// closes all of it: the process has copies. What the process gets are its streams,
// the socket, what third opens, the program of package launch, and what more opens.
func (l *launching) withFiles(b *Builtin, third func() (*os.File, error), do func(ours net.Conn) error, more ...func() (*os.File, error)) error {
	defer func() {
		for _, file := range l.files {
			_ = file.Close()
		}
	}()
	ours, err := l.open(append([]func() (*os.File, error){third, b.openLauncher}, more...)...)
	if err != nil {
		return err
	}
	defer ours.Close()
	if err := l.use(ours); err != nil {
		return err
	}
	return do(ours)
}

// open opens the streams, the socket, and what comes after it. It returns our end of
// the socket.
func (l *launching) open(after ...func() (*os.File, error)) (net.Conn, error) {
	for number, given := range l.streams.files() {
		stream, err := copyOrNull(given, number)
		if err != nil {
			return nil, err
		}
		l.files = append(l.files, stream)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	l.files = append(l.files, theirs)
	for _, open := range after {
		file, err := open()
		if err != nil {
			return nil, errors.Join(err, ours.Close())
		}
		l.files = append(l.files, file)
	}
	return ours, nil
}

// send hands the list to the process. The socket has no other end here from then on,
// so that there is an end to read when the process has ended.
func (l *launching) send(list io.WriterTo, ours net.Conn) error {
	if _, err := list.WriteTo(ours); err != nil {
		return fmt.Errorf("say what to do: %w", err)
	}
	return l.files[launch.Socket].Close()
}

// openLauncher is the program of package launch, in memory since the first use.
func (b *Builtin) openLauncher() (*os.File, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.launcher == nil {
		elf, err := launch.Program()
		if err == nil {
			b.launcher, err = sealedFile(launch.Name, elf, unix.MFD_EXEC)
		}
		if err != nil {
			return nil, err
		}
	}
	return copyFile(b.launcher)
}

func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	file := os.NewFile(uintptr(fds[0]), "launch")
	defer file.Close()
	theirs = os.NewFile(uintptr(fds[1]), "launched")
	ours, err = net.FileConn(file)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return ours, theirs, nil
}

// makeFIFO makes the exec barrier as libcontainer has it: the user that the
// process runs as may write to it.
func makeFIFO(path string) (*os.File, error) {
	const mode = 0o622
	if err := unix.Mkfifo(path, mode); err != nil {
		return nil, fmt.Errorf("make the exec barrier: %w", err)
	}
	if err := os.Chmod(path, mode); err != nil { // the umask
		return nil, err
	}
	return os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
}
