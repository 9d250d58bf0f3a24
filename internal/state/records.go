package state

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	suffix          = ".json"
	temporaryPrefix = ".new-"
)

// Records are the records of one kind: the files ID.json of one directory.
type Records[T any] struct {
	directory string
	version   int
	durable   bool
	writer    string
}

// envelope is what stands in a file: the record, the version of its schema, and
// which program wrote it.
type envelope[T any] struct {
	Version int    `json:"version"`
	Writer  string `json:"writer,omitempty"`
	Record  T      `json:"record"`
}

// Open makes the directory if it is not there and returns its records. A
// durable kind survives a power cut; version is the schema that this program
// writes and the newest one that it reads.
func Open[T any](directory string, version int, durable bool) (*Records[T], error) {
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory for records: %w", err)
	}
	return &Records[T]{directory: directory, version: version, durable: durable}, nil
}

// WrittenBy names the program that writes from now on, with its version: what a
// program reads that is older than the schema names the build that can.
func (r *Records[T]) WrittenBy(writer string) { r.writer = writer }

// Path is where the record of id stands.
func (r *Records[T]) Path(id string) string { return filepath.Join(r.directory, id+suffix) }

// Write replaces the record of id.
func (r *Records[T]) Write(id string, record T) error { return r.write(id, record, r.durable) }

// Update replaces the record of id, if there is one: fs.ErrNotExist where another process
// has removed it.
func (r *Records[T]) Update(id string, record T) error {
	if _, err := os.Lstat(r.Path(id)); err != nil {
		return err
	}
	return r.Write(id, record)
}

// Put replaces the record of id for all that read it from now on, after a crash
// of the daemon too; a power cut may still undo it, until Sync returns.
func (r *Records[T]) Put(id string, record T) error { return r.write(id, record, false) }

// Sync makes what Put has written durable.
func (r *Records[T]) Sync(id string) error {
	if err := syncFile(r.Path(id)); err != nil {
		return fmt.Errorf("sync the record of %s: %w", id, err)
	}
	return syncFile(r.directory)
}

func (r *Records[T]) write(id string, record T, durable bool) error {
	data, err := json.MarshalIndent(envelope[T]{r.version, r.writer, record}, "", " ")
	if err == nil {
		err = WriteFile(r.Path(id), append(data, '\n'), durable)
	}
	if err != nil {
		return fmt.Errorf("write the record of %s: %w", id, err)
	}
	return nil
}

// Remove deletes the record of id, one in quarantine too; one that is not there
// is no error.
func (r *Records[T]) Remove(id string) error {
	found := false
	for _, path := range []string{filepath.Join(r.directory, quarantine, id+suffix), r.Path(id)} {
		// Looked for first: on a read-only file system unlink(2) fails also for what is not there.
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove the record of %s: %w", id, err)
		}
		found = true
	}
	_ = os.Remove(filepath.Join(r.directory, quarantine)) // fails while there are others
	if !found || !r.durable {
		return nil
	}
	return syncFile(r.directory)
}

// IDs lists whose records stand in a directory, without reading them; none if
// there is no such directory.
func IDs(directory string) ([]string, error) {
	entries, err := os.ReadDir(directory)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var ids []string
	for _, entry := range entries {
		if id, isRecord := strings.CutSuffix(entry.Name(), suffix); isRecord && !IsTemporary(id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Bad is a record that could not be read, or not be decoded, and where it is.
type Bad struct {
	ID     string
	Path   string
	Reason error
}

// errUndecodable marks the errors of a file that was read and makes no sense.
var errUndecodable = errors.New("cannot be decoded")

// ErrLaterSchema is the error of a record that a later version of the program
// wrote. To continue without it would take what it describes for orphans.
var ErrLaterSchema = errors.New("written by a later version")

// Load reads all records and clears away the temporary files of writes that were
// cut off. A file that cannot be decoded goes into quarantine; one that cannot
// be read (EIO, EMFILE, EACCES) stays where it is, for the next Load. Neither
// stops the others. A record of a later schema does: ErrLaterSchema.
func (r *Records[T]) Load() (map[string]T, []Bad, error) {
	if err := ClearTemporary(r.directory); err != nil {
		return nil, nil, err
	}
	ids, err := IDs(r.directory)
	if err != nil {
		return nil, nil, err
	}
	records := make(map[string]T)
	var bad []Bad
	for _, id := range ids {
		var record T
		data, err := ReadFile(r.Path(id))
		if err == nil {
			record, err = r.decode(r.Path(id), data)
		}
		switch {
		case errors.Is(err, ErrLaterSchema):
			return nil, nil, err
		case errors.Is(err, errUndecodable):
			bad = append(bad, r.Quarantine(id, err))
		case err != nil:
			bad = append(bad, Bad{ID: id, Path: r.Path(id), Reason: err})
		default:
			records[id] = record
		}
	}
	_, err = Quarantined(r.directory) // what cannot be listed may hold any record
	return records, bad, err
}

// decode looks at the schema first: a later one may have another form.
func (r *Records[T]) decode(path string, data []byte) (T, error) {
	var e envelope[T]
	var head envelope[json.RawMessage]
	if err := json.Unmarshal(data, &head); err != nil {
		return e.Record, fmt.Errorf("%w: %w", errUndecodable, err)
	}
	if head.Version > r.version {
		return e.Record, fmt.Errorf("%s has schema %d, written by %s; this program reads schemas 1 to %d: run that version again, or remove the pod with it first: %w",
			path, head.Version, cmp.Or(head.Writer, "an unnamed version"), r.version, ErrLaterSchema)
	}
	if head.Version < 1 {
		return e.Record, fmt.Errorf("%w: schema version %d", errUndecodable, head.Version)
	}
	if len(head.Record) == 0 || string(head.Record) == "null" {
		return e.Record, fmt.Errorf("%w: there is no record in it", errUndecodable)
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return e.Record, fmt.Errorf("%w: %w", errUndecodable, err)
	}
	return e.Record, nil
}

// Peek reads one record of a directory that another process writes, of any schema.
// T may have only some of its fields.
func Peek[T any](directory, id string) (record T, err error) {
	data, err := ReadFile((&Records[T]{directory: directory}).Path(id))
	if err != nil {
		return record, err
	}
	var e envelope[*T]
	switch err := json.Unmarshal(data, &e); {
	case err != nil:
		return record, fmt.Errorf("%w: %w", errUndecodable, err)
	case e.Version < 1 || e.Record == nil:
		return record, fmt.Errorf("%w: schema version %d, or there is no record in it", errUndecodable, e.Version)
	}
	return *e.Record, nil
}

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

// OpenObjects opens the records and the facts of a kind of object, in two directories;
// kind is what an object is called in the log, writer the version of the program.
func OpenObjects[R, F any](kind, records, facts, writer string, logger *slog.Logger) (*Objects[R, F], error) {
	o := &Objects[R, F]{leftAlone: make(map[string]bool), logger: logger, kind: kind}
	var err error
	if o.Records, err = Open[R](records, 1, true); err != nil {
		return nil, err
	}
	if o.Facts, err = Open[F](facts, 1, false); err != nil {
		return nil, err
	}
	o.Records.writer, o.Facts.writer = writer, writer
	return o, nil
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
