package starter

import (
	"net"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// FuzzReceive: what a peer writes and sends along is a message, or an error; it has four
// descriptors at most, and no other stays open.
func FuzzReceive(f *testing.F) {
	f.Add([]byte("\x00"+`{"verb":"exec","id":"a","streams":[true,true,true],"process":{"args":["sh"]},"exec_cgroup":{"sub":"b"}}`), uint8(3))
	f.Add([]byte("\x00"+`{"pid":1,"cgroups":{"":"/a"},"error":"no","kind":"not found"}`), uint8(0))
	f.Add([]byte("\x00{"), uint8(199))
	f.Fuzz(func(t *testing.T, sent []byte, descriptors uint8) {
		if len(sent) == 0 || len(sent) > 64<<10 {
			return // more than the socket holds
		}
		open := func() int {
			entries, err := os.ReadDir("/proc/self/fd")
			harness.Check(t, err)
			return len(entries)
		}
		before := open()
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		harness.Check(t, err)
		rights := unix.UnixRights(slices.Repeat(pair[:1], int(descriptors)%200)...)
		harness.Check(t, unix.Sendmsg(pair[1], sent, rights, nil, 0))
		harness.Check(t, unix.Close(pair[1]))
		end := os.NewFile(uintptr(pair[0]), "end")
		conn, err := net.FileConn(end)
		harness.Check(t, err)
		_ = end.Close()

		var request Request
		files, err := receive(conn.(*net.UnixConn), &request)
		harness.Want(t, len(files) <= 4, "%d descriptors, %v", len(files), err)
		closeAll(files)
		_ = conn.Close()
		harness.Same(t, "open descriptors", open(), before)
	})
}
