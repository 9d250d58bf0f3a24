package seal

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// A page of the file is held, by a pipe, for longer than the kernel waits.
func TestAddWhileAPageIsHeld(t *testing.T) {
	fd, err := unix.MemfdCreate("seal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	harness.Check(t, err)
	file := os.NewFile(uintptr(fd), "seal")
	defer file.Close()
	_, err = file.Write(make([]byte, os.Getpagesize()))
	harness.Check(t, err)
	reader, writer, err := os.Pipe()
	harness.Check(t, err)
	defer reader.Close()
	defer writer.Close()
	from := int64(0)
	_, err = unix.Splice(fd, &from, int(writer.Fd()), nil, os.Getpagesize(), 0)
	harness.Check(t, err)
	_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	harness.Need(t, err == unix.EBUSY, "the kernel seals a file with a page that is held: %v: this shows nothing", err)
	release := time.AfterFunc(500*time.Millisecond, func() { _, _ = reader.Read(make([]byte, os.Getpagesize())) })
	defer release.Stop()
	harness.Check(t, add(file, unix.F_SEAL_WRITE))
	_, err = file.WriteAt([]byte{1}, 0)
	harness.Want(t, err != nil, "it can be written")
}
