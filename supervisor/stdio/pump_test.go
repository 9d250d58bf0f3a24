package stdio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/pipe"
	"github.com/minicri/minicri/supervisor/stdio/crilog"
	"github.com/minicri/minicri/test/harness"
)

// What a container writes after it has read its own output is moved: another reader takes
// bytes at the worst moment, after they were seen and before they are read.
func TestPumpBesideAnotherReader(t *testing.T) {
	container, p, got := pumpOf(t)
	stole := make(chan struct{})
	read := p.read
	p.read = func(source *os.File) ([]byte, error) {
		select {
		case <-stole:
		default:
			_, err := container.Read(make([]byte, 100))
			harness.Want(t, err == nil, "%v", err)
			close(stole)
		}
		return read(source)
	}
	go p.Run()
	_, _ = container.WriteString("stolen")
	<-stole
	_, _ = container.WriteString("next")
	harness.Same(t, "what is moved then", <-got, "next")
}

// Clients share what they have not read yet, and nothing is kept for one that is too slow.
func TestFanoutKeepsLittle(t *testing.T) {
	f := &Fanout{clients: make(map[chan []byte]bool)}
	slow := f.Attach(false)
	for range cap(slow) {
		f.emit([]byte("early"))
	}
	a, b := f.Attach(false), f.Attach(false)
	f.emit([]byte("late"))
	got := [2][]byte{<-a, <-b}
	_, open := <-slow
	harness.Want(t, !open, "the slow one gets more: %t; the others %q", open, got)
	harness.Want(t, string(got[0]) == "late", "the slow one gets more: %t; the others %q", open, got)
	harness.Want(t, &got[0][0] == &got[1][0], "the slow one gets more: %t; the others %q", open, got)
}

// pumpOf is a pump of a fifo, and the end of the container.
func pumpOf(t *testing.T) (container *os.File, p *Pump, got chan string) {
	path := filepath.Join(t.TempDir(), "fifo")
	harness.Check(t, unix.Mkfifo(path, 0o600))
	source, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	harness.Check(t, err)
	container, err = os.OpenFile(path, os.O_RDWR, 0)
	harness.Check(t, err)
	got = make(chan string, 10)
	p = newPump(source, func(b []byte) { got <- string(b) })
	t.Cleanup(func() {
		_ = p.Close()
		<-p.Done()
		_ = container.Close()
	})
	return container, p, got
}

// Where the disk of the spool is full, output goes on without it; and it does not grow with a line that never ends.
func TestSpool(t *testing.T) {
	dir := t.TempDir()
	harness.Check(t, unix.Mount("none", dir, "tmpfs", 0, "size=256k"))
	t.Cleanup(func() { harness.Check(t, unix.Unmount(dir, 0)) })
	log, err := crilog.Open(filepath.Join(t.TempDir(), "log"))
	harness.Check(t, err)
	s, err := openSpool(filepath.Join(dir, "spool"))
	harness.Check(t, err)
	s.entries = log.Stream("stdout")
	s.entries.Progress = s.logging
	container, p, got := pumpOf(t)
	p.read = s.read
	p.emit = func(b []byte) {
		_, _ = s.entries.Write(b)
		s.logged()
		got <- string(b)
	}
	go p.Run()
	defer func() {
		_ = p.Close()
		<-p.done // it uses the spool
		s.close()
	}()
	send := func(text string) {
		t.Helper()
		_, _ = container.WriteString(text)
		for moved := 0; moved < len(text); {
			moved += len(<-got)
		}
	}
	for range 100 {
		send(string(make([]byte, 9000)))
		harness.Need(t, !s.broken, "a line without an end fills the disk")
	}
	harness.Check(t, os.WriteFile(filepath.Join(dir, "full"), make([]byte, 200<<10), 0o600))
	send(string(make([]byte, 60000)))
	harness.Want(t, s.broken, "it is said to be kept on a full disk")
	harness.Check(t, os.Remove(filepath.Join(dir, "full")))
	send("end\n")
	send("more")
	harness.Want(t, !s.broken && s.end-s.start == 4, "there is space again: broken %t, %d bytes are kept", s.broken, s.end-s.start)
}

// FuzzSpool: whatever a predecessor has left in the spool and in the log, what a
// container wrote before that stays in the log, and all that comes are whole lines.
func FuzzSpool(f *testing.F) {
	const written = "2026-11-23T00:00:00Z stdout F before\n"
	f.Add(int64(spoolData), int64(len(written)), true, []byte("data\n"), []byte("2026-11-23T00:00:01Z stdout F lin"))
	f.Add(int64(spoolData+2), int64(len(written)), false, []byte("data\nline"), []byte("2026-11-23T00:00:01Z stdout F ta\n"))
	f.Add(int64(-1), int64(-1), true, []byte{0xc0, 0xff}, []byte("2026-11-23T00:00:01Z stdout P \n \n"))
	f.Add(int64(1)<<62, int64(1)<<62, true, []byte("\n"), []byte("\n"))
	f.Add(int64(0), int64(0), true, make([]byte, crilog.MaxLine-1), []byte("")) // leaves a line that is nearly full
	f.Fuzz(func(t *testing.T, start, offset int64, same bool, data, after []byte) {
		dir := t.TempDir()
		logPath, path := filepath.Join(dir, "log"), filepath.Join(dir, "spool")
		harness.Check(t, os.WriteFile(logPath, append([]byte(written), after...), 0o600))
		if offset >= 0 && offset < int64(len(written)) {
			offset += int64(len(written)) // no supervisor has begun behind what another wrote
		}
		var info unix.Stat_t
		harness.Check(t, unix.Stat(logPath, &info))
		if !same {
			info.Ino++
		}
		header := make([]byte, spoolData)
		binary.NativeEndian.PutUint64(header, uint64(start))
		binary.NativeEndian.PutUint64(header[8:], info.Ino)
		binary.NativeEndian.PutUint64(header[16:], uint64(offset))
		harness.Check(t, os.WriteFile(path, append(header, data...), 0o600))
		log, err := crilog.Open(logPath)
		harness.Check(t, err)
		s, err := openSpool(path)
		harness.Check(t, err)
		defer s.close()
		s.entries = log.Stream("stdout")
		_ = s.resume(log, "stdout")
		_, _ = s.entries.Write([]byte("\nlater\n")) // behind the line that was left, which may be full in the middle of a word
		harness.Check(t, log.Close())
		content, err := os.ReadFile(logPath)
		harness.Need(t, err == nil, "%v: the log has %q", err, content)
		harness.Want(t, strings.HasPrefix(string(content), written), "%v: the log has %q", err, content)
		harness.Want(t, strings.HasSuffix(string(content), "later\n"), "%v: the log has %q", err, content)
	})
}

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
			harness.Same(t, c.what, pipe.Resize(got, 80, 25), nil)
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

// A stream that epoll does not take (a file, or where a limit is reached) is refused: nobody would read it.
func TestStreamOutsideThePoller(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stdout")
	harness.Check(t, os.WriteFile(path, nil, 0o600))
	file, err := os.Open(path)
	harness.Check(t, err)
	err = new(Streams).readFifo(file, Options{}, "stdout")
	harness.Want(t, errors.Is(err, errdefs.ErrUnavailable), "%v", err)
}

// Fifos are where a container can reach them: what has taken the place of one is not opened.
func TestReplacedFifo(t *testing.T) {
	dir := t.TempDir()
	fifo, _, err := Open(Options{Dir: dir, SpoolDir: t.TempDir(), ID: "c"})
	harness.Check(t, err)
	fifo.Close()
	path := fifoPath(dir, "c", "stdout")
	for _, row := range []struct {
		name    string
		replace func() error
	}{
		{"a link to a file", func() error { return os.Symlink("/etc/passwd", path) }},
		{"a link to a fifo", func() error { return os.Symlink(fifoPath(dir, "c", "stderr"), path) }},
		{"a file", func() error { return os.WriteFile(path, nil, 0o600) }},
		{"a directory", func() error { return os.Mkdir(path, 0o700) }},
		{"a device", func() error { return unix.Mknod(path, unix.S_IFCHR|0o600, 1<<8|3) }},
	} {
		harness.Check(t, errors.Join(os.Remove(path), row.replace()))
		_, err := Adopt(Options{Dir: dir, ID: "c"})
		harness.Want(t, err != nil, "%s is opened", row.name)
	}
}
