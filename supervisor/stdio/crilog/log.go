package crilog

import (
	"bytes"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Log is a container's log file.
type Log struct {
	path    string
	buffers *Buffers

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
// neither a fifo nor a device is opened. buffers may be nil.
func Open(path string, buffers *Buffers) (*Log, error) {
	file, err := openFile(path)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return &Log{path: path, buffers: buffers, file: file}, nil
}

// Late is a log whose file could not be opened because of cause. What is written
// counts as lost until Reopen has opened it.
func Late(path string, buffers *Buffers, cause error) *Log {
	return &Log{path: path, buffers: buffers, lost: lost{cause: cause}}
}

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

// write appends whole entries, or counts those that the disk did not take.
func (l *Log) write(entries []byte, progress Progress) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(entries) == 0 {
		return
	}
	if l.file == nil {
		l.count(entries, l.lost.cause)
		return
	}
	if !l.sayLoss() {
		l.count(entries, l.lost.cause)
		return
	}
	if progress != nil {
		defer progress.Written()
		progress.Writing(l.place())
	}
	if rest, err := l.append(entries); err != nil {
		l.count(entries[len(entries)-rest:], err)
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
