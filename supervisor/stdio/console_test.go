package stdio

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/test/harness"
)

// The master of a pseudo-terminal is taken. Nothing else is, not two of them either, and
// nothing of what is refused stays open.
func TestReceiveMaster(t *testing.T) {
	master, slave := openTerminal(t)
	regular, err := os.Create(filepath.Join(t.TempDir(), "regular"))
	harness.Check(t, err)
	defer regular.Close()
	reader, writer, err := os.Pipe()
	harness.Check(t, err)
	defer reader.Close()
	defer writer.Close()
	for _, c := range []struct {
		what string
		sent []*os.File
		take bool
	}{
		{"a pipe", []*os.File{reader}, false},
		{"a regular file", []*os.File{regular}, false},
		{"a slave", []*os.File{slave}, false},
		{"nothing", nil, false},
		{"two masters", []*os.File{master, master}, false},
		{"five masters", []*os.File{master, master, master, master, master}, false},
		{"a master", []*os.File{master}, true},
	} {
		before := openFiles(t)
		got, err := receiveSent(t, c.sent)
		harness.Want(t, c.take == (err == nil), "%s: %v", c.what, err)
		if got != nil {
			harness.Same(t, c.what, Resize(got, 80, 25), nil)
			_ = got.Close()
		}
		harness.Same(t, c.what+": open files", openFiles(t), before)
	}
}

// receiveSent is what ReceiveMaster makes of a message with these files.
func receiveSent(t *testing.T, files []*os.File) (*os.File, error) {
	ours, theirs, err := socket.Pair()
	harness.Check(t, err)
	defer ours.Close()
	defer theirs.Close()
	var rights []byte
	if len(files) > 0 {
		var fds []int
		for _, file := range files {
			fds = append(fds, int(file.Fd()))
		}
		rights = unix.UnixRights(fds...)
	}
	harness.Check(t, unix.Sendmsg(int(theirs.Fd()), []byte("/dev/ptmx"), rights, nil, 0))
	return ReceiveMaster(ours)
}

// openTerminal does as posix_openpt(3), unlockpt(3) and ptsname(3) do.
func openTerminal(t *testing.T) (master, slave *os.File) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	harness.Check(t, err)
	t.Cleanup(func() { _ = master.Close() })
	number, err := unix.IoctlGetUint32(int(master.Fd()), unix.TIOCGPTN)
	harness.Check(t, err)
	harness.Check(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	harness.Check(t, err)
	t.Cleanup(func() { _ = slave.Close() })
	return master, slave
}

func openFiles(t *testing.T) int {
	files, err := os.ReadDir("/proc/self/fd")
	harness.Check(t, err)
	return len(files)
}

// The last words on a terminal are moved, also those that the kernel has not handed to its
// master yet when the process has ended.
func TestLastWordsOnATerminal(t *testing.T) {
	for range 200 {
		master, slave := openTerminal(t)
		source, err := receiveSent(t, []*os.File{master})
		harness.Check(t, err)
		said := ""
		p := newPump(source, func(b []byte) { said += string(b) })
		harness.Check(t, source.SetReadDeadline(time.Unix(1, 0)))
		_, _ = slave.WriteString("last")
		p.Run()
		_, _ = master.Close(), slave.Close()
		harness.Want(t, said == "last", "moved %q", said)
	}
}
