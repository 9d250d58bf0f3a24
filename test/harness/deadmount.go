package harness

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// DeadMount is a mount whose server never answers: a FUSE filesystem (fuse(4))
// whose requests no one reads, until the test ends.
func DeadMount(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	Check(t, err)
	Check(t, unix.Mount("dead", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server.Fd())))
	t.Cleanup(func() {
		Check(t, server.Close()) // processes that wait get an error
		Check(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
	return dir
}
