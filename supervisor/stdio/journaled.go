package stdio

import (
	"fmt"

	"github.com/minicri/minicri/supervisor/stdio/crilog"
	"github.com/minicri/minicri/supervisor/stdio/journal"
)

// journaled is the memory of a pump whose bytes go to a log, and what the log
// reports its progress: when the supervisor is killed, its successor finds in the
// journal what was read and is not in the log.
type journaled struct {
	journal *journal.Journal
	owner   string
	whole   bool          // the source does not say how many bytes wait
	slot    *journal.Slot // nil while there is nothing to keep
	entries *crilog.Stream
}

func (j *journaled) take(pending int) []byte {
	if j.slot == nil {
		j.slot = j.journal.Acquire(j.owner)
	}
	if j.whole {
		pending = journal.BufferSize
	}
	return j.slot.Begin(max(pending, 1)) // 0: the end, or a byte that came since
}

func (j *journaled) have(n int) { j.slot.Have(n) }

// moved is called when all entries are written.
func (j *journaled) moved() {
	switch line := j.entries.Line(); {
	case j.slot == nil:
	case len(line) > 0:
		j.slot.Keep(line)
	default:
		j.journal.Release(j.slot)
		j.slot = nil
	}
}

// flush ends the stream: a line without an end is one.
func (j *journaled) flush() {
	j.entries.Flush()
	j.moved()
}

// Writing is of crilog.Progress.
func (j *journaled) Writing(inode uint64, offset int64) {
	if j.slot != nil {
		j.slot.Writing(inode, offset)
	}
}

// Written is of crilog.Progress.
func (j *journaled) Written() {
	if j.slot != nil {
		j.slot.Written()
	}
}

// resume brings to the log what a predecessor has left in the journal.
func (j *journaled) resume(log *crilog.Log, stream string) error {
	if j.slot = j.journal.Take(j.owner); j.slot == nil {
		return nil
	}
	defer j.moved()
	left := j.slot.Left()
	switch {
	case left.Logged:
		j.entries.Restore(crilog.Rest(left.Line, left.Data))
	case left.Begun:
		return j.finish(log, stream, left)
	default:
		j.entries.Restore(left.Line)
		_, _ = j.entries.Write(left.Data) // never fails
	}
	return nil
}

// finish writes what a write that was cut off has not written.
func (j *journaled) finish(log *crilog.Log, stream string, left journal.Left) error {
	logged, known, err := log.Resume(left.Inode, left.Offset, stream)
	all := append(left.Line, left.Data...)
	if err != nil || !known || logged > len(all) {
		log.Say(fmt.Sprintf("up to %d bytes of %s may be missing here: the supervisor was killed while the log was rotated", len(all), stream))
		return err
	}
	_, _ = j.entries.Write(all[logged:]) // never fails
	return nil
}
