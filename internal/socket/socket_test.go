package socket_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/test/harness"
)

func TestCheckFree(t *testing.T) {
	dir := t.TempDir()
	file, stale, used, datagrams := filepath.Join(dir, "file"), filepath.Join(dir, "stale"), filepath.Join(dir, "used"), filepath.Join(dir, "datagrams")
	harness.Check(t, os.WriteFile(file, nil, 0o600))
	listen := func(path string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		harness.Check(t, err)
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	harness.Check(t, listen(stale).Close())
	listen(used)
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: datagrams, Net: "unixgram"})
	harness.Check(t, err)
	defer conn.Close()

	for path, want := range map[string]error{
		filepath.Join(dir, "nothing"): nil,
		stale:                         nil,
		used:                          socket.ErrInUse,
		datagrams:                     socket.ErrInUse,
		file:                          socket.ErrNotSocket,
	} {
		err := socket.CheckFree(path)
		harness.Want(t, errors.Is(err, want), "%s: got %v, want %v", filepath.Base(path), err, want)
	}
	_, err = os.Lstat(stale)
	harness.Want(t, err == nil, "looking removed it: %v", err)
}

// The mode is right from the first moment on, whatever the umask, which stays.
func TestListenPrivate(t *testing.T) {
	mask := unix.Umask(0)
	defer unix.Umask(mask)
	path := filepath.Join(t.TempDir(), "socket")
	listener, err := socket.ListenPrivate(path)
	harness.Check(t, err)
	info, err := os.Stat(path)
	harness.Want(t, err == nil && info.Mode() == os.ModeSocket|0o600, "got %v, %v", info.Mode(), err)
	harness.Check(t, listener.Close())
	_, err = os.Lstat(path)
	harness.Want(t, errors.Is(err, os.ErrNotExist), "the socket is left: %v", err)
	short := &shortListener{}
	_, err = socket.Steady(short).Accept()
	harness.Want(t, errors.Is(err, net.ErrClosed) && short.accepts == 3, "Accept %d: %v", short.accepts, err)
}

// shortListener is short of watches twice, and then closed.
type shortListener struct {
	net.Listener
	accepts int
}

func (l *shortListener) Accept() (net.Conn, error) {
	if l.accepts++; l.accepts < 3 {
		return nil, unix.ENOSPC
	}
	return nil, net.ErrClosed
}

// A socket whose path every user may open still admits root alone.
func TestRootOnly(t *testing.T) {
	harness.Want(t, os.Geteuid() == 0, "needs root")
	path := filepath.Join(t.TempDir(), "sock")
	listener, err := socket.ListenPrivate(path)
	harness.Check(t, err)
	defer listener.Close()
	for _, opened := range []string{path, filepath.Dir(path), filepath.Dir(filepath.Dir(path))} {
		harness.Check(t, os.Chmod(opened, 0o777))
	}
	go func() {
		for guarded := socket.RootOnly(listener); ; {
			connection, err := guarded.Accept()
			if err != nil {
				return
			}
			_, _ = connection.Write([]byte("secret"))
			_ = connection.Close()
		}
	}()
	for uid, want := range map[int]string{65534: "", 0: "secret"} {
		got := readAs(t, uid, path)
		harness.Want(t, got == want, "user %d reads %q, want %q", uid, got, want)
	}
}

// readAs connects as a user and reads to the end.
func readAs(t *testing.T, uid int, path string) string {
	t.Helper()
	read := make(chan string)
	go func() {
		defer close(read)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			t.Error(errno)
			return
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(fd)
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			t.Error(err)
			return
		}
		buffer := make([]byte, 64)
		n, _ := unix.Read(fd, buffer) // 0 for a connection that was closed
		read <- string(buffer[:max(n, 0)])
	}()
	return <-read
}
