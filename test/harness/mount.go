package harness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// DeadMount is a mount whose server never answers: a FUSE filesystem (fuse(4)) whose requests no one reads,
// until the test ends.
func DeadMount(t testing.TB) (dir string) {
	t.Helper()
	dir = t.TempDir()
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	Check(t, err)
	Check(t, unix.Mount("dead", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server.Fd())))
	t.Cleanup(func() {
		Check(t, server.Close()) // processes that wait get an error
		Check(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
	return dir
}

// StuckMount is a DeadMount whose server has read the requests: who waits for an answer sleeps uninterruptibly.
// asked is closed when somebody does.
func StuckMount(t testing.TB) (dir string, asked <-chan struct{}) {
	t.Helper()
	dir = t.TempDir()
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	Check(t, err)
	Check(t, unix.Mount("stuck", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)))
	var done sync.WaitGroup
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_FORCE) // processes that wait get an error, as the server does; it is busy
		done.Wait()
		Check(t, errors.Join(unix.Close(server), unix.Unmount(dir, unix.MNT_DETACH)))
	})
	request := make([]byte, 1<<17)
	_, err = unix.Read(server, request)
	Check(t, err)
	// struct fuse_out_header and fuse_init_out of version 7.31 (include/uapi/linux/fuse.h) answer FUSE_INIT.
	answer := make([]byte, 80)
	binary.NativeEndian.PutUint32(answer, uint32(len(answer)))
	copy(answer[8:16], request[8:16]) // the request's id
	binary.NativeEndian.PutUint32(answer[16:], 7)
	binary.NativeEndian.PutUint32(answer[20:], 31)
	_, err = unix.Write(server, answer)
	Check(t, err)
	first := make(chan struct{})
	done.Go(func() {
		ask := sync.OnceFunc(func() { close(first) })
		for err == nil || errors.Is(err, unix.EINTR) {
			if _, err = unix.Read(server, request); err == nil {
				ask()
			}
		}
	})
	return dir, first
}

// Disk mounts a file system of its own on a directory. While it is frozen who writes there sleeps, uninterruptibly.
func Disk(t testing.TB, dir string) (freeze func() (thaw func())) {
	t.Helper()
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %q: %v: %s", name, args, err, out)
		}
	}
	file := filepath.Join(t.TempDir(), "disk")
	run("truncate", "-s", "64M", file)
	run("mkfs.ext4", "-q", file)
	run("mount", "-o", "loop", file, dir)
	// Until it executes, a child of a parallel test shares the files that are open here.
	t.Cleanup(func() { run("umount", "--lazy", dir) })
	return func() (thaw func()) {
		run("fsfreeze", "--freeze", dir)
		thaw = sync.OnceFunc(func() { run("fsfreeze", "--unfreeze", dir) })
		t.Cleanup(thaw)
		return thaw
	}
}
