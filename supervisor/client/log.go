package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Log is the file that a supervisor logs to, in its directory.
const Log = "shim.log"

const (
	maxPassedOn = 64 << 10  // bytes of a log that are passed on at a time
	keptLog     = 128 << 10 // how much of what was passed on stays in the file
	// passedOn is the attribute of the file that tells the next daemon up to where it was passed on.
	passedOn = "trusted.minicri.passed"
)

// passLogsOn copies what supervisors log to the daemon's log. Without a daemon it stays in the file.
func (s *Set) passLogsOn() {
	passed := make(map[string]int64) // by group, up to where its log was passed on
	for {
		groups, err := s.Groups()
		if err == nil { // else they are there the next time
			maps.DeleteFunc(passed, func(name string, _ int64) bool { return !slices.Contains(groups, name) })
		}
		for _, name := range groups {
			if err := s.passLogOn(name, passed); err != nil && !errors.Is(err, fs.ErrNotExist) {
				s.options.Logger.Debug("the log of a supervisor cannot be read", "build", name, "err", err)
			}
		}
		select {
		case <-s.base.Done():
			return
		case <-time.After(logPeriod):
		}
	}
}

// TailOfLog is the end of a supervisor's log.
func TailOfLog(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	tail := make([]byte, min(size, 2*keptLog))
	n, _ := file.ReadAt(tail, size-int64(len(tail))) // to its end
	return bytes.TrimLeft(tail[:n], "\x00"), nil     // of the hole
}

func (s *Set) passLogOn(name string, passed map[string]int64) error {
	file, err := os.OpenFile(filepath.Join(s.Dir(name), Log), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	from, known := passed[name]
	if !known {
		from = passedBefore(file)
	}
	lines := make([]byte, maxPassedOn)
	for {
		n, _ := file.ReadAt(lines, from) // to its end
		whole := bytes.LastIndexByte(lines[:n], '\n') + 1
		if whole == 0 && n == maxPassedOn {
			whole = n // one long line
		}
		passed[name] = from + int64(whole)
		if whole == 0 {
			return nil
		}
		for line := range strings.Lines(string(lines[:whole])) {
			level, text := parseLine(strings.TrimSpace(line))
			s.options.Logger.Log(context.Background(), level, "supervisor", "build", name, "said", text)
		}
		from += int64(whole)
		// The disk is released but for the end: cutting the file while the supervisor appends would lose a
		// line. Without the note the next daemon passes on again what the file has.
		if over := (from - keptLog) &^ 4095; over > 0 {
			_ = unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, over) // it stays long
		}
		_ = unix.Fsetxattr(int(file.Fd()), passedOn, strconv.AppendInt(nil, from, 10), 0)
	}
}

// passedBefore is up to where another daemon has passed a log on. If nothing says so, because no daemon may
// set the attribute or the file system has none, it is the beginning of what the file still has.
func passedBefore(file *os.File) int64 {
	number := make([]byte, 32)
	n, _ := unix.Fgetxattr(int(file.Fd()), passedOn, number)
	from, _ := strconv.ParseInt(string(number[:max(n, 0)]), 10, 64) // 0 without one
	if data, err := file.Seek(from, unix.SEEK_DATA); err == nil {
		return data
	}
	return from // the end
}

// parseLine takes time and level off a line of log/slog. A level in small letters is a library's, to which
// a client that has gone is an error: we log it for debugging. All else is the end of a failing program.
func parseLine(line string) (level slog.Level, text string) {
	_, rest, _ := strings.Cut(line, " level=")
	word, text, _ := strings.Cut(rest, " ")
	switch err := level.UnmarshalText([]byte(word)); {
	case err != nil:
		return slog.LevelError, line
	case word != strings.ToUpper(word):
		return slog.LevelDebug, text
	}
	return level, text
}
