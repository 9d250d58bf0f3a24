// Package crilog writes a container's output in the CRI log format:
//
//	2006-01-02T15:04:05.999999999Z stdout F the line\n
//
// A Log is a container's file, shared by its streams; a Stream cuts what it is given into lines. Lines longer
// than MaxLine become P entries and a final F; a last line without a newline is a P entry.
//
// Log.mu guards the file and the counts of what was lost; a Stream is used by one goroutine.
//
// Writing never fails the container. What the disk does not take is counted, and the log says so once there
// is space again.
package crilog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// Log is a container's log file.
type Log struct {
	path string

	mu     sync.Mutex
	file   *os.File // nil when closed, and before a late log is opened
	closed bool
	lost   lost
}

type lost struct {
	entries int
	bytes   int
	cause   error
}

// Open opens or makes the file at path, whose directory exists, and appends to it. It opens neither a fifo
// nor a device, and follows no symbolic link in the last element or the guarded part of an api.GuardedPath.
func Open(path string) (*Log, error) {
	file, err := openFile(path)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return &Log{path: path, file: file}, nil
}

// Late is a log whose file Reopen opens. What is written before counts as lost.
func Late(path string) *Log { return &Log{path: path} }

// Reopen continues in a new file at the same path, after the old one was renamed away. Each entry is in
// exactly one of them. With an error the old file stays in use.
func (l *Log) Reopen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return fmt.Errorf("reopen log %s: %w", l.path, os.ErrClosed)
	}
	file, err := openFile(l.path)
	if err != nil {
		if l.file == nil {
			l.lost.cause = err
		}
		return fmt.Errorf("reopen log: %w", err)
	}
	_ = l.file.Close() // nothing is buffered; nil does nothing
	l.file = file
	return nil
}

// Close closes the file. Streams must have been flushed.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.file == nil {
		return nil
	}
	l.sayLoss()
	err := l.file.Close()
	l.file = nil
	return err
}

// write appends the entries that next returns, until it returns none, or counts what the disk did not take.
func (l *Log) write(next func() []byte, progress func(inode uint64, offset int64)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	begun := false
	for entries := next(); len(entries) > 0; entries = next() {
		if l.closed {
			continue
		}
		if l.file == nil || !l.sayLoss() {
			l.count(entries, l.lost.cause)
			continue
		}
		if progress != nil && !begun {
			begun = true
			progress(l.place())
		}
		if rest, err := l.append(entries); err != nil {
			l.count(entries[len(entries)-rest:], err)
		}
	}
}

// place is where the next entry goes.
func (l *Log) place() (inode uint64, offset int64) {
	var stat unix.Stat_t
	raw, err := l.file.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &stat) })
	}
	if err != nil {
		return 0, 0 // no file has this inode
	}
	return stat.Ino, stat.Size
}

// sayLoss writes what was lost before, and reports whether the log is whole.
func (l *Log) sayLoss() bool {
	if l.lost.entries == 0 {
		return true
	}
	note := fmt.Sprintf("%s stderr F minicri: %d log lines (%d bytes) were lost: %v\n",
		time.Now().UTC().Format(time.RFC3339Nano), l.lost.entries, l.lost.bytes, l.lost.cause)
	if _, err := l.append([]byte(note)); err != nil {
		return false
	}
	l.lost = lost{}
	return true
}

func (l *Log) count(entries []byte, cause error) {
	l.lost.entries += bytes.Count(entries, []byte{'\n'})
	l.lost.bytes += len(entries)
	l.lost.cause = cause
}

// append writes whole entries, cuts off a partial one, and returns how many bytes are not in the file.
func (l *Log) append(entries []byte) (rest int, err error) {
	n, err := l.file.Write(entries)
	if err == nil {
		return 0, nil
	}
	whole := bytes.LastIndexByte(entries[:n], '\n') + 1
	if n > whole {
		if end, statErr := l.file.Stat(); statErr == nil {
			_ = l.file.Truncate(end.Size() - int64(n-whole))
		}
	}
	return len(entries) - whole, err
}

// openFile makes the file, or opens the one that is there. It may come or go meanwhile.
func openFile(path string) (file *os.File, err error) {
	base, name, guarded := strings.Cut(path, api.PathGuard)
	if !guarded {
		base, name = filepath.Split(path)
	}
	directory, err := os.OpenFile(filepath.Clean(base), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer directory.Close()
	for range 10 {
		file, err = openBelow(directory, name, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_EXCL, 0o640)
		if errors.Is(err, fs.ErrExist) {
			file, err = openExisting(directory, name)
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	return file, err
}

// openBelow opens a file of a directory, behind no symbolic link (openat2(2)).
func openBelow(directory *os.File, name string, flags, mode uint64) (*os.File, error) {
	path := filepath.Join(directory.Name(), name)
	fd, err := unix.Openat2(int(directory.Fd()), name, &unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC, Mode: mode, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("open %s: below %s there is a symbolic link, and none is followed there: %w: %w", path, directory.Name(), err, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// openExisting opens a file by O_PATH, which opens no fifo and no device, and then by its
// descriptor, so that what was looked at is what is opened (open(2), proc_pid_fd(5)).
func openExisting(directory *os.File, name string) (*os.File, error) {
	place, err := openBelow(directory, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer place.Close()
	info, err := place.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is %v and not a regular file, remove it: %w", place.Name(), info.Mode().Type(), errdefs.ErrInvalidArgument)
	}
	file, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", place.Fd()), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", place.Name(), err)
	}
	return file, nil
}

// Resume returns how many bytes of a stream the entries from an offset hold. It cuts off a partial entry,
// whose writer was killed. known is false if the log is by now in another file than that of the inode.
func (l *Log) Resume(inode uint64, offset int64, stream string) (payload int, known bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return 0, false, nil
	}
	if now, size := l.place(); now != inode || size < offset {
		return 0, false, nil
	}
	file, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", l.file.Fd()), os.O_RDWR, 0)
	if err != nil {
		return 0, false, fmt.Errorf("read log %s: %w", l.path, err)
	}
	defer file.Close()
	entries, err := io.ReadAll(io.NewSectionReader(file, offset, 1<<62))
	if err != nil {
		return 0, false, fmt.Errorf("read log %s: %w", l.path, err)
	}
	whole := bytes.LastIndexByte(entries, '\n') + 1
	if whole < len(entries) {
		if err := file.Truncate(offset + int64(whole)); err != nil {
			return 0, false, fmt.Errorf("cut log %s: %w", l.path, err)
		}
	}
	for entry := range bytes.Lines(entries[:whole]) {
		payload += payloadOf(entry, stream)
	}
	return payload, true, nil
}

func payloadOf(entry []byte, stream string) int {
	fields := bytes.SplitN(bytes.TrimSuffix(entry, []byte{'\n'}), []byte{' '}, 4)
	if len(fields) < 4 || string(fields[1]) != stream {
		return 0
	}
	if string(fields[2]) == "F" {
		return len(fields[3]) + 1
	}
	return len(fields[3])
}

// Say writes a line of minicri's own.
func (l *Log) Say(words string) {
	s := l.Stream("stderr")
	_, _ = s.Write([]byte("minicri: " + words + "\n")) // never fails
}

// MaxLine is how many bytes of a line one entry holds, as in other runtimes.
const MaxLine = 16 << 10

// Stream cuts one stream of a container into entries.
type Stream struct {
	// Progress is called, while no other stream writes to the log, when entries are about to be written to
	// the file of an inode, from an offset on; nil: nobody asks.
	Progress func(inode uint64, offset int64)

	log  *Log
	name string // "stdout" or "stderr"
	line []byte // the beginning of a line whose end is not here yet, at most MaxLine
	out  []byte // entries that are written at once
}

// Stream returns a writer for "stdout" or "stderr".
func (l *Log) Stream(name string) *Stream { return &Stream{log: l, name: name} }

// Line is the beginning of a line whose end is not here yet.
func (s *Stream) Line() []byte { return s.line }

// Write never fails. An unfinished last line waits for its end. Entries of one Write have one time; some 96
// KiB of them are written at once, because 64 KiB of newlines make 2.7 MiB of entries.
func (s *Stream) Write(p []byte) (int, error) {
	stamp, rest := s.stamp(), p
	s.log.write(func() []byte {
		for s.out = s.out[:0]; len(rest) > 0 && len(s.out) < 96<<10; {
			rest = s.take(stamp, rest)
		}
		return s.out
	}, s.Progress)
	return len(p), nil
}

// take moves one line, or what fits of it, and returns the rest.
func (s *Stream) take(stamp, p []byte) []byte {
	room := min(MaxLine-len(s.line), len(p))
	if end := bytes.IndexByte(p[:room], '\n'); end >= 0 {
		s.entry(stamp, 'F', p[:end])
		return p[end+1:]
	}
	if len(s.line)+room < MaxLine {
		s.line = append(s.line, p[:room]...)
		return nil
	}
	if room < len(p) && p[room] == '\n' {
		s.entry(stamp, 'F', p[:room])
		return p[room+1:]
	}
	s.entry(stamp, 'P', p[:room])
	return p[room:]
}

func (s *Stream) entry(stamp []byte, tag byte, tail []byte) {
	s.out = append(s.out, stamp...)
	s.out = append(s.out, tag, ' ')
	s.out = append(s.out, s.line...)
	s.out = append(s.out, tail...)
	s.out = append(s.out, '\n')
	s.line = s.line[:0]
}

// Flush logs an unfinished last line when the stream has ended. It has the tag P, as in containerd and
// CRI-O: a reader adds the newline of an F, and the program has written none.
func (s *Stream) Flush() {
	s.log.write(func() []byte {
		s.out = s.out[:0]
		if len(s.line) > 0 {
			s.entry(s.stamp(), 'P', nil)
		}
		return s.out
	}, s.Progress)
}

func (s *Stream) stamp() []byte {
	stamp := make([]byte, 0, 64)
	stamp = time.Now().UTC().AppendFormat(stamp, time.RFC3339Nano)
	stamp = append(stamp, ' ')
	stamp = append(stamp, s.name...)
	return append(stamp, ' ')
}
