package crilog

import (
	"bytes"
	"fmt"
	"io"
	"os"
)

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

// Rest is what is left of bytes when all entries that they make are written: the
// beginning of a line.
func Rest(line, data []byte) []byte {
	s := (&Log{closed: true}).Stream("", nil)
	s.Restore(line)
	_, _ = s.Write(data) // never fails
	return s.line
}

// Say writes a line of minicri's own.
func (l *Log) Say(words string) {
	s := l.Stream("stderr", nil)
	_, _ = s.Write([]byte("minicri: " + words + "\n")) // never fails
}
