package crilog

import (
	"bytes"
	"time"
)

// MaxLine is how many bytes of a line one entry holds, the limit that kubelets
// and log agents know from other runtimes.
const MaxLine = 16 << 10

// Stream cuts one stream of a container into entries.
type Stream struct {
	// Progress is called, while no other stream writes to the log, when entries are about to
	// be written to the file of an inode, from an offset on; nil: nobody asks.
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

// mostEntries is about the most that is written to the file at a time, and with it the
// largest buffer of a stream: 64 KiB of newlines are entries of 2.7 MiB.
const mostEntries = 96 << 10

// Write logs p, except for an unfinished last line, which waits for its end.
// It never fails: see Log. Entries of one Write have one time.
func (s *Stream) Write(p []byte) (int, error) {
	stamp, rest := s.stamp(), p
	s.log.write(func() []byte {
		for s.out = s.out[:0]; len(rest) > 0 && len(s.out) < mostEntries; {
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

// entry appends the waiting beginning and tail as one entry.
func (s *Stream) entry(stamp []byte, tag byte, tail []byte) {
	s.out = append(s.out, stamp...)
	s.out = append(s.out, tag, ' ')
	s.out = append(s.out, s.line...)
	s.out = append(s.out, tail...)
	s.out = append(s.out, '\n')
	s.line = s.line[:0]
}

// Flush logs an unfinished last line: the stream has ended. It has the tag P, as
// containerd and CRI-O write it: a reader adds the newline of an F, and the
// program has written none.
func (s *Stream) Flush() {
	s.log.write(func() []byte {
		s.out = s.out[:0]
		if len(s.line) > 0 {
			s.entry(s.stamp(), 'P', nil)
		}
		return s.out
	}, s.Progress)
}

// stamp is the beginning of an entry: time, stream and a space each.
func (s *Stream) stamp() []byte {
	stamp := make([]byte, 0, 64)
	stamp = time.Now().UTC().AppendFormat(stamp, time.RFC3339Nano)
	stamp = append(stamp, ' ')
	stamp = append(stamp, s.name...)
	return append(stamp, ' ')
}
