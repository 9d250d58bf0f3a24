package state

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
)

// Objects are the files of one kind of object, a pod say: the record of what
// each was made from, and the facts of what became of it. An object whose files
// cannot be read is left alone: nothing of it is changed or removed.
type Objects[R, F any] struct {
	Records *Records[R]
	Facts   *Records[F]

	// leftAlone are the ids of records in quarantine and of those that could not
	// be read, unread the files of the latter. Load and Quarantine change them,
	// which one goroutine calls before others read.
	leftAlone map[string]bool
	unread    []string
	logger    *slog.Logger
	kind      string
}

// Group is a Records and a Facts as one; kind is what an object is called in
// the log.
func Group[R, F any](records *Records[R], facts *Records[F], kind string, logger *slog.Logger) *Objects[R, F] {
	return &Objects[R, F]{Records: records, Facts: facts, leftAlone: make(map[string]bool), logger: logger, kind: kind}
}

// Load reads all records and facts, as Records.Load does. A record that says it
// is another object's goes into quarantine. lost are the ids whose facts could
// not be read.
func (o *Objects[R, F]) Load(idOf func(R) string) (records map[string]R, facts map[string]F, lost []string, err error) {
	records, bad, err := o.Records.Load()
	if err != nil {
		return nil, nil, nil, err
	}
	facts, badFacts, err := o.Facts.Load()
	if err != nil {
		return nil, nil, nil, err
	}
	for _, path := range o.Records.Quarantined() {
		o.leftAlone[IDOf(path)] = true
	}
	for _, b := range bad {
		o.leftAlone[b.ID] = true
		o.report(b)
	}
	for _, b := range badFacts {
		lost = append(lost, b.ID)
		o.report(b)
	}
	for id, record := range records {
		if its := idOf(record); its != id {
			o.Quarantine(id, fmt.Errorf("it is a copy of the record of %s %q", o.kind, its))
			delete(records, id)
		}
	}
	return records, facts, lost, nil
}

// Quarantine puts a record into quarantine, and leaves its object alone.
func (o *Objects[R, F]) Quarantine(id string, reason error) {
	o.LeaveAlone(id)
	o.report(o.Records.Quarantine(id, reason))
}

// LeaveAlone is Quarantine for an object whose own files are in order.
func (o *Objects[R, F]) LeaveAlone(id string) { o.leftAlone[id] = true }

// LeftAlone reports whether the object with the id is left alone.
func (o *Objects[R, F]) LeftAlone(id string) bool { return o.leftAlone[id] }

// Quarantined are the files of records and facts that cannot be read.
func (o *Objects[R, F]) Quarantined() []string {
	return slices.Concat(o.Records.Quarantined(), o.Facts.Quarantined(), o.unread)
}

// report logs which file could not be read. One that is not in quarantine is
// read again by the next daemon.
func (o *Objects[R, F]) report(b Bad) {
	o.logger.Error("a record cannot be read: its object is left alone; 'minicri check' says what to do", o.kind, b.ID, "file", b.Path, "err", b.Reason)
	if dir := filepath.Dir(b.Path); dir == o.Records.directory || dir == o.Facts.directory {
		o.unread = append(o.unread, b.Path)
	}
}
