package image

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// What was unmounted is mounted nowhere at once, and not in use once the store
// is closed: the disk below can be unmounted.
func TestCloseEndsWhatWasUnmounted(t *testing.T) {
	disk, registry := t.TempDir(), newTestRegistry(t)
	must(t, unix.Mount("tmpfs", disk, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	s, err := Open(t.Context(), Config{Root: disk})
	must(t, err)
	image := pull(t, s, registry.push(t, "gone:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "1")))))
	for _, key := range []string{"c1", "c2", "c3", "c4"} {
		must(t, s.Prepare(t.Context(), key, image.ID, PrepareOptions{}))
		target := filepath.Join(t.TempDir(), "rootfs")
		must(t, s.Mount(t.Context(), key, target, ""))
		report(t, os.WriteFile(filepath.Join(target, "written"), make([]byte, 1<<20), 0o644))
		report(t, s.Unmount(target))
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), target) {
			t.Errorf("%s is still mounted (%v)", target, err)
		}
		report(t, s.RemoveSnapshot(t.Context(), key))
	}
	s.closeLater(lingering(t))
	var behind [2]int
	must(t, unix.Pipe2(behind[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	t.Cleanup(func() { _ = unix.Close(behind[0]) })
	s.closeLater(behind[1])
	report(t, s.Close())
	if n, err := unix.Read(behind[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("the store is closed, and what was to be ended before is not: %d, %v", n, err)
	}
	// A process that looks at all mounts of the machine holds each for a moment.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Unmount(disk, 0)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("unmount the disk of a store that is closed: %v", err)
		}
	}
}

// lingering returns a descriptor whose close takes a second: a socket with SO_LINGER
// (socket(7)) and more to send than the other end takes.
func lingering(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	address := &unix.SockaddrInet4{Port: listener.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}}
	if err := errors.Join(unix.Connect(fd, address), unix.SetNonblock(fd, true),
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 1})); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = unix.Write(fd, make([]byte, 1<<16))
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	return fd
}
