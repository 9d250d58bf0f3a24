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

// lost counts entries that the disk did not take since the last that it took.
type lost struct {
	entries int
	bytes   int
	cause   error
}

// Open opens or makes the file at path and appends to it. It fails if its
// directory is absent, and where something else than a file has its place: a
// symbolic link is not followed (of api.GuardedPath: in all that is guarded), and
// neither a fifo nor a device is opened.
func Open(path string) (*Log, error) {
	file, err := openFile(path)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return &Log{path: path, file: file}, nil
}

// Late is a log whose file is not open yet. What is written counts as lost until Reopen has
// opened it.
func Late(path string) *Log { return &Log{path: path} }

// Reopen continues in a new file at the same path, after the old one was renamed
// away. Each entry is in exactly one of them. With an error the old file stays
// in use.
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
	if l.file != nil {
		_ = l.file.Close() // nothing is buffered
	}
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

// write appends the whole entries that next returns, until it returns none, or counts
// those that the disk did not take.
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

// append writes whole entries and returns how many bytes of them are not in
// the file. An entry that was written in part is cut off again.
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

// split parts a path into what may have symbolic links and what may not: only its
// last element if it is not one of api.GuardedPath.
func split(path string) (base, name string) {
	if base, name, found := strings.Cut(path, api.PathGuard); found {
		return base, name
	}
	return filepath.Split(path)
}

// openFile makes the file, or opens the one that is there. It may come or go meanwhile.
func openFile(path string) (file *os.File, err error) {
	base, name := split(path)
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

// Resume returns how many bytes of a stream its entries hold that begin at an
// offset or behind it, and cuts off one that was written in part: the process that wrote
// them was killed. known is false if the log is in another file by now, which is
// not that of the inode.
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
		payload += held(entry, stream)
	}
	return payload, true, nil
}

// held is how many bytes of the stream one entry holds.
func held(entry []byte, stream string) int {
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
