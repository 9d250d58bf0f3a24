package state

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/minicri/minicri/internal/step/failpoint"
)

const (
	suffix          = ".json"
	temporaryPrefix = ".new-"
)

// Records are the records of one kind: the files ID.json of a directory.
type Records[T any] struct {
	directory string
	version   int
	durable   bool
	writer    string
	hit       func(point string) error
}

// envelope is the content of a file: the record, its schema, and the program that wrote it.
type envelope[T any] struct {
	Version int    `json:"version"`
	Writer  string `json:"writer,omitempty"`
	Record  T      `json:"record"`
}

// Open returns the records of a directory, which it makes if missing. version is the schema that this
// program writes, and the newest that it reads; durable records survive a power cut.
func Open[T any](directory string, version int, durable bool) (*Records[T], error) {
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory for records: %w", err)
	}
	return &Records[T]{directory: directory, version: version, durable: durable, hit: failpoint.Hit}, nil
}

// WrittenBy sets the version of the program that writes, which one that is too old for the schema names.
func (r *Records[T]) WrittenBy(writer string) { r.writer = writer }

// Hit sets what the records call at their failpoint, see package failpoint.
func (r *Records[T]) Hit(hit func(point string) error) { r.hit = hit }

// Path is the file of the record of id.
func (r *Records[T]) Path(id string) string { return filepath.Join(r.directory, id+suffix) }

// Write replaces the record of id.
func (r *Records[T]) Write(id string, record T) error {
	return r.write(id, record, r.durable, os.Rename)
}

// Update replaces the record of id; fs.ErrNotExist if another process removed it.
func (r *Records[T]) Update(id string, record T) error {
	return r.write(id, record, r.durable, exchange)
}

// Put replaces the record of id, even for a daemon after a crash, but a power cut may undo it until Sync.
func (r *Records[T]) Put(id string, record T) error { return r.write(id, record, false, os.Rename) }

// Sync makes what Put wrote durable.
func (r *Records[T]) Sync(id string) error {
	if err := syncFile(r.Path(id)); err != nil {
		return fmt.Errorf("sync the record of %s: %w", id, err)
	}
	return syncFile(r.directory)
}

func (r *Records[T]) write(id string, record T, durable bool, put func(temporary, path string) error) error {
	data, err := json.MarshalIndent(envelope[T]{r.version, r.writer, record}, "", " ")
	if err == nil {
		err = writeFile(r.Path(id), append(data, '\n'), durable, put, r.hit)
	}
	if err != nil {
		return fmt.Errorf("write the record of %s: %w", id, err)
	}
	return nil
}

// Remove deletes the record of id, even in quarantine. It is no error if there is none.
func (r *Records[T]) Remove(id string) error {
	found := false
	for _, path := range []string{filepath.Join(r.directory, quarantine, id+suffix), r.Path(id)} {
		// On a read-only file system unlink(2) fails even if there is no file.
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

// IDs lists whose records a directory has, without reading them; none without the directory.
func IDs(directory string) ([]string, error) {
	entries, err := os.ReadDir(directory)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var ids []string
	for _, entry := range entries {
		if id, isRecord := strings.CutSuffix(entry.Name(), suffix); isRecord && !isTemporary(id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Bad is a record that could not be read or decoded, and its path.
type Bad struct {
	ID     string
	Path   string
	Reason error
}

// errUndecodable marks errors of a file that was read and makes no sense.
var errUndecodable = errors.New("cannot be decoded")

// ErrLaterSchema marks a record of a later version. If it were ignored, its object would be an orphan.
var ErrLaterSchema = errors.New("written by a later version")

// Load reads all records and clears the temporary files of interrupted writes. A file that cannot be
// decoded goes into quarantine; one that cannot be read (EIO, EMFILE, EACCES) stays for the next Load.
// Only a record of a later schema stops it, with ErrLaterSchema.
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
	_, err = Quarantined(r.directory) // if it cannot be listed, it may hold any record
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

// Peek reads one record of any schema that another process writes. T may have only some fields.
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

// Objects are the files of one kind of object: the record that each was made from, and the facts of what
// became of it. An object with unreadable files is not changed or removed: it is left alone.
type Objects[R, F any] struct {
	Records *Records[R]
	Facts   *Records[F]

	// leftAlone are the ids of records in quarantine and of unreadable ones; unread are files of the latter.
	// Both change in Load and Quarantine only, in one goroutine before others read.
	leftAlone map[string]bool
	unread    []string
	logger    *slog.Logger
	kind      string
}

// OpenObjects opens the two directories of a kind of object; writer is the version of the program.
func OpenObjects[R, F any](ctx context.Context, kind, records, facts, writer string, logger *slog.Logger) (*Objects[R, F], error) {
	o := &Objects[R, F]{leftAlone: make(map[string]bool), logger: logger, kind: kind}
	var err error
	if o.Records, err = Open[R](records, 1, true); err != nil {
		return nil, err
	}
	if o.Facts, err = Open[F](facts, 1, false); err != nil {
		return nil, err
	}
	o.Records.WrittenBy(writer)
	o.Facts.WrittenBy(writer)
	o.Records.Hit(failpoint.From(ctx))
	o.Facts.Hit(failpoint.From(ctx))
	return o, nil
}

// Load reads all records and facts, like Records.Load. A record that claims to be another object's goes
// into quarantine. lost are the ids of unreadable facts.
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

// Quarantined returns the files of unreadable records and facts.
func (o *Objects[R, F]) Quarantined() []string {
	return slices.Concat(o.Records.Quarantined(), o.Facts.Quarantined(), o.unread)
}

// report logs an unreadable file. Outside quarantine the next daemon reads it again.
func (o *Objects[R, F]) report(b Bad) {
	o.logger.Error("a record cannot be read: its object is left alone; 'minicri check' says what to do", o.kind, b.ID, "file", b.Path, "err", b.Reason)
	if dir := filepath.Dir(b.Path); dir == o.Records.directory || dir == o.Facts.directory {
		o.unread = append(o.unread, b.Path)
	}
}
