package stdio

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/stdio/crilog"
)

// spool keeps what was read from a fifo and is not in the log yet, for the successor of a killed
// supervisor. The kernel moves bytes from the fifo into the spool's file by splice(2), which a kill does
// not cut off: a byte is in one of the two. The file is empty while bytes wait in the fifo only.
//
// A header says where the bytes begin that are not logged, and, while entries of them are being written,
// where in the log. It is one write, which a kill does not cut off either.
type spool struct {
	file    *os.File // nil if it cannot be opened: then what was read dies with the supervisor
	entries *crilog.Stream
	start   int64 // the bytes from here to end are not logged
	end     int64
	punched int64
	broken  bool // it does not have all that was read: the disk is full
}

// spoolData is where bytes begin in a spool, behind the header.
const spoolData = 4096

// openSpool opens the spool at path. One that cannot be opened can be used.
func openSpool(path string) (*spool, error) {
	s := &spool{start: spoolData, end: spoolData, punched: spoolData}
	var err error
	if s.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return s, fmt.Errorf("what is read and not logged is lost if the supervisor is killed: %w", err)
	}
	return s, nil
}

func (s *spool) read(fifo *os.File) ([]byte, error) {
	if s.file == nil || s.broken {
		return readChunk(fifo)
	}
	raw, err := fifo.SyscallConn()
	if err != nil {
		return nil, err
	}
	var moved int64
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		// A signal may interrupt it while bytes wait. The poller is edge-triggered, and would not report them again.
		for failed = unix.EINTR; failed == unix.EINTR; {
			offset := s.end
			moved, failed = unix.Splice(int(fd), nil, int(s.file.Fd()), &offset, pumpBuffer, unix.SPLICE_F_NONBLOCK)
		}
		return failed != unix.EAGAIN
	})
	switch {
	case err != nil:
		return nil, err
	case failed != nil:
		s.giveUp()
		return readChunk(fifo)
	case moved == 0:
		return nil, io.EOF
	}
	data := make([]byte, moved)
	_, err = s.file.ReadAt(data, s.end)
	s.end += moved
	return data, err
}

// logging notes where in which file entries of the bytes are about to be written.
func (s *spool) logging(inode uint64, offset int64) {
	if s.file == nil || s.broken {
		return
	}
	header := binary.NativeEndian.AppendUint64(nil, uint64(s.start))
	header = binary.NativeEndian.AppendUint64(header, inode)
	if _, err := s.file.WriteAt(binary.NativeEndian.AppendUint64(header, uint64(offset)), 0); err != nil {
		s.giveUp()
	}
}

// giveUp is for a full disk, until the log has all that was read.
func (s *spool) giveUp() {
	s.broken = true
	_ = s.file.Truncate(0)
}

// logged is called when all is logged but the beginning of a line. On nil it does nothing.
func (s *spool) logged() {
	if s == nil || s.file == nil {
		return
	}
	line := int64(len(s.entries.Line()))
	if line == 0 {
		s.broken = s.file.Truncate(0) != nil
		s.start, s.end, s.punched = spoolData, spoolData, spoolData
		return
	}
	s.start = s.end - line
	s.logging(0, 0)
	if s.start-s.punched >= pumpBuffer && !s.broken {
		_ = unix.Fallocate(int(s.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, s.punched, s.start-s.punched)
		s.punched = s.start
	}
}

// resume brings to the log what a predecessor has left. If the log was rotated while the predecessor wrote
// to it, a line in the log says what may be missing.
func (s *spool) resume(log *crilog.Log, stream string) error {
	if s.file == nil {
		return nil
	}
	content, err := io.ReadAll(io.NewSectionReader(s.file, 0, spoolData))
	if err != nil || len(content) < spoolData {
		return err // empty
	}
	s.start = max(spoolData, int64(binary.NativeEndian.Uint64(content)))
	inode, offset := binary.NativeEndian.Uint64(content[8:]), int64(binary.NativeEndian.Uint64(content[16:]))
	data, err := io.ReadAll(io.NewSectionReader(s.file, s.start, 1<<62))
	s.end = s.start + int64(len(data))
	if err == nil && inode != 0 {
		done, known, resumeErr := log.Resume(inode, offset, stream)
		if err = resumeErr; err != nil || !known || done > len(data) {
			log.Say(fmt.Sprintf("up to %d bytes of %s may be missing here: the supervisor was killed while the log was rotated", len(data), stream))
			done = len(data)
		}
		data = data[done:]
		s.start += int64(done)
	}
	_, _ = s.entries.Write(data) // never fails
	s.logged()
	return err
}

// begun reports whether a predecessor was writing entries, the last of which may be cut off.
func (s *spool) begun() bool {
	inode := make([]byte, 8)
	if s.file == nil {
		return false
	}
	_, err := s.file.ReadAt(inode, 8)
	return err == nil && binary.NativeEndian.Uint64(inode) != 0
}

func (s *spool) close() {
	if s != nil && s.file != nil {
		_ = s.file.Close()
	}
}
