package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
)

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
	entries, err := os.ReadDir(r.directory)
	if err != nil {
		return nil, nil, fmt.Errorf("list records: %w", err)
	}
	records := make(map[string]T)
	var bad []Bad
	for _, entry := range entries {
		id, isRecord := strings.CutSuffix(entry.Name(), suffix)
		if !isRecord {
			continue
		}
		record, err := r.read(id)
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
	return records, bad, r.trimQuarantine()
}

func (r *Records[T]) read(id string) (T, error) {
	data, err := ReadFile(r.Path(id))
	if err != nil {
		var none T
		return none, err
	}
	return r.decode(r.Path(id), data)
}

// decode looks at the schema first: a later one may have another form.
func (r *Records[T]) decode(path string, data []byte) (T, error) {
	var e envelope[T]
	var head envelope[json.RawMessage]
	if err := json.Unmarshal(data, &head); err != nil {
		return e.Record, fmt.Errorf("%w: %w", errUndecodable, err)
	}
	if head.Version > r.version {
		writer := head.Writer
		if writer == "" {
			writer = "a version that does not give its name"
		}
		return e.Record, fmt.Errorf("%s has schema %d, written by %s; this program reads schemas 1 to %d: run that version again, or remove the pod with it first: %w",
			path, head.Version, writer, r.version, ErrLaterSchema)
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
