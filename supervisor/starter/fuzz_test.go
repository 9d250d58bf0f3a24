package starter

import (
	"errors"
	"net"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzReceive: what a peer writes and sends along is a message, or an error; no
// descriptor is kept of an error, and none but those that are returned.
func FuzzReceive(f *testing.F) {
	message := func(text string) []byte { return append([]byte{0}, text...) }
	f.Add(message(`{"verb":"exec","id":"a","streams":[true,true,true],"process":{"args":["sh"]},"exec_cgroup":{"sub":"b"}}`), uint8(3))
	f.Add(message(`{"pid":1,"cgroups":{"":"/a"},"error":"no","kind":"not found"}`), uint8(0))
	f.Add(message("{}")[:2], uint8(1))
	f.Add(message("{"), uint8(4))
	f.Add([]byte{0, 0}, uint8(199))
	f.Fuzz(func(t *testing.T, sent []byte, descriptors uint8) {
		if len(sent) == 0 || len(sent) > 64<<10 {
			return // more than the socket holds
		}
		before := openFiles(t)
		ours := written(t, sent, int(descriptors)%200)
		var request Request
		files, err := receive(ours, &request)
		if err != nil && len(files) > 0 || len(files) > maxFiles {
			t.Errorf("%d descriptors, %v", len(files), err)
		}
		closeAll(files)
		_ = ours.Close()
		if after := openFiles(t); after != before {
			t.Errorf("%d descriptors are open, before there were %d", after, before)
		}
	})
}

// written is a socket whose other end has sent bytes and descriptors, and was closed.
func written(t *testing.T, sent []byte, descriptors int) *net.UnixConn {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var rights []byte
	if descriptors > 0 {
		rights = unix.UnixRights(slices.Repeat([]int{fds[0]}, descriptors)...)
	}
	ours := os.NewFile(uintptr(fds[0]), "ours")
	err = errors.Join(unix.Sendmsg(fds[1], sent, rights, nil, 0), unix.Close(fds[1]))
	conn, connErr := net.FileConn(ours)
	if err := errors.Join(err, connErr, ours.Close()); err != nil {
		t.Fatal(err)
	}
	return conn.(*net.UnixConn)
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
