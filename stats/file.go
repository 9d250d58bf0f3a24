package stats

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"

	"golang.org/x/sys/unix"
)

// reader reads the files of one cgroup after another into one buffer. A file
// that cannot be read or parsed leaves out what is in it and nothing else; what
// was wrong with it is kept for failed.
type reader struct {
	buffer []byte
	errs   []error
}

const (
	// bufferSize holds most files, memory.stat several times.
	bufferSize = 16 << 10
	// maxFile is that of a million processes, or of ten thousand devices.
	maxFile = 8 << 20
)

// failed returns what went wrong since it was last called.
func (r *reader) failed() error {
	errs := r.errs
	r.errs = nil
	return errors.Join(errs...)
}

// read returns the content of a file, which is good until the next read, and
// false if there is none. It bypasses os.File, whose poller and finalizer cost
// more than the reading.
func (r *reader) read(dir, name string) ([]byte, bool) {
	path := dir + "/" + name
	content, err := r.readFile(path)
	switch {
	case err == nil:
		return content, true
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.EOPNOTSUPP):
		// Absent, removed while it was open, or switched off as PSI can be.
		return nil, false
	}
	r.errs = append(r.errs, fmt.Errorf("read %s: %w", path, err))
	return nil, false
}

func (r *reader) readFile(path string) ([]byte, error) {
	if r.buffer == nil {
		r.buffer = make([]byte, bufferSize)
	}
	fd, err := open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	for length := 0; ; {
		if length == len(r.buffer) {
			if length >= maxFile {
				return nil, unix.EFBIG
			}
			r.buffer = append(r.buffer, make([]byte, length)...)
		}
		n, err := unix.Read(fd, r.buffer[length:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return r.buffer[:length], nil
		}
		length += n
	}
}

func open(path string) (int, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// number reads a file that is one number. "max" is the largest one.
func (r *reader) number(dir, name string) (uint64, bool) {
	content, found := r.read(dir, name)
	if !found {
		return 0, false
	}
	content = bytes.TrimSpace(content)
	if string(content) == "max" {
		return math.MaxUint64, true
	}
	return r.parse(dir, name, content)
}

func (r *reader) parse(dir, name string, text []byte) (uint64, bool) {
	value, err := strconv.ParseUint(string(text), 10, 64)
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("read %s/%s: %w", dir, name, err))
		return 0, false
	}
	return value, true
}

// table reads some rows of a file of "key value" lines, and reports whether it
// could. Rows that are not there leave their variables as they are.
func (r *reader) table(dir, name string, rows map[string]*uint64) bool {
	content, found := r.read(dir, name)
	if !found {
		return false
	}
	for line := range bytes.Lines(content) {
		key, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		row := rows[string(key)]
		if row == nil {
			continue
		}
		if *row, found = r.parse(dir, name, value); !found {
			return false
		}
	}
	return true
}
