package runtime

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// taskLog reads the fifo "log" of a bundle, where a shim writes its own log. A
// shim does not start without a reader. The end is kept, for errors.
type taskLog struct {
	file *os.File
	done chan struct{}

	mu   sync.Mutex
	said []byte
}

// mostSaid is how much of a shim's log is kept.
const mostSaid = 1 << 10

func openTaskLog(bundle string) (*taskLog, error) {
	path := filepath.Join(bundle, "log")
	if err := unix.Mkfifo(path, 0o600); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("fifo %s: %w", path, err)
	}
	// For writing too: it has no end while the shim has not opened it.
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	l := &taskLog{file: file, done: make(chan struct{})}
	go l.run()
	return l, nil
}

func (l *taskLog) run() {
	defer close(l.done)
	for buffer := make([]byte, 4096); ; {
		n, err := l.file.Read(buffer)
		if err != nil {
			return
		}
		l.mu.Lock()
		l.said = append(l.said, buffer[:n]...)
		l.said = l.said[max(0, len(l.said)-mostSaid):]
		l.mu.Unlock()
	}
}

// last is the last line of the log.
func (l *taskLog) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return lastLine(strings.ToValidUTF8(string(l.said), "?"))
}

func (l *taskLog) close() {
	_ = l.file.Close()
	<-l.done
}
