package seal

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A page of the file is held, by a pipe, for longer than the kernel waits.
func TestAddWhileAPageIsHeld(t *testing.T) {
	fd, err := unix.MemfdCreate("seal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "seal")
	defer file.Close()
	if _, err := file.Write(make([]byte, os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	defer writer.Close()
	from := int64(0)
	if _, err := unix.Splice(fd, &from, int(writer.Fd()), nil, os.Getpagesize(), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err != unix.EBUSY {
		t.Fatalf("the kernel seals a file with a page that is held: %v: this shows nothing", err)
	}
	release := time.AfterFunc(500*time.Millisecond, func() { _, _ = reader.Read(make([]byte, os.Getpagesize())) })
	defer release.Stop()
	if err := add(file, unix.F_SEAL_WRITE); err != nil {
		t.Error(err)
	}
	if _, err := file.WriteAt([]byte{1}, 0); err == nil {
		t.Error("it can be written")
	}
}
