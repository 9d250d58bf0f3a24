package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
)

const (
	suffix          = ".json"
	temporaryPrefix = ".new-"
	quarantine      = "quarantine"
)

// Records are the records of one kind: the files ID.json of one directory.
type Records[T any] struct {
	directory string
	version   int
	durable   bool
}

// envelope is what stands in a file: the record and the version of its schema.
type envelope[T any] struct {
	Version int `json:"version"`
	Record  T   `json:"record"`
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

// Path is where the record of id stands.
func (r *Records[T]) Path(id string) string { return filepath.Join(r.directory, id+suffix) }

// Write replaces the record of id.
func (r *Records[T]) Write(id string, record T) error { return r.write(id, record, r.durable) }

// Put replaces the record of id for whoever reads it from now on, after a crash
// of the daemon too; a power cut may still take it back, until Sync returns.
func (r *Records[T]) Put(id string, record T) error { return r.write(id, record, false) }

// Sync makes what Put has written durable.
func (r *Records[T]) Sync(id string) error {
	if err := syncFile(r.Path(id)); err != nil {
		return fmt.Errorf("sync the record of %s: %w", id, err)
	}
	return syncFile(r.directory)
}

func (r *Records[T]) write(id string, record T, durable bool) error {
	data, err := json.MarshalIndent(envelope[T]{r.version, record}, "", " ")
	if err != nil {
		return fmt.Errorf("encode the record of %s: %w", id, err)
	}
	if err := WriteFile(r.Path(id), append(data, '\n'), durable); err != nil {
		return fmt.Errorf("write the record of %s: %w", id, err)
	}
	return nil
}

// Remove deletes the record of id; one that is not there is no error.
func (r *Records[T]) Remove(id string) error {
	if _, err := os.Lstat(r.Path(id)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := os.Remove(r.Path(id)); err != nil {
		return fmt.Errorf("remove the record of %s: %w", id, err)
	}
	if !r.durable {
		return nil
	}
	return syncFile(r.directory)
}

// Bad is a record that could not be read, and where it has been set aside.
type Bad struct {
	ID     string
	Path   string
	Reason error
}

// Load reads all records, sets aside those that cannot be read, and clears
// away the temporary files of writes that were cut off.
func (r *Records[T]) Load() (map[string]T, []Bad, error) {
	entries, err := os.ReadDir(r.directory)
	if err != nil {
		return nil, nil, fmt.Errorf("list records: %w", err)
	}
	records := make(map[string]T)
	var bad []Bad
	for _, entry := range entries {
		id, isRecord := strings.CutSuffix(entry.Name(), suffix)
		switch {
		case IsTemporary(entry.Name()):
			if err := os.Remove(filepath.Join(r.directory, entry.Name())); err != nil {
				return nil, nil, fmt.Errorf("clear a write that was cut off: %w", err)
			}
		case isRecord && !entry.IsDir():
			record, err := r.read(id)
			if err != nil {
				bad = append(bad, r.SetAside(id, err))
				continue
			}
			records[id] = record
		}
	}
	return records, bad, nil
}

func (r *Records[T]) read(id string) (T, error) {
	var e envelope[T]
	data, err := os.ReadFile(r.Path(id))
	if err != nil {
		return e.Record, err
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return e.Record, fmt.Errorf("decode: %w", err)
	}
	if e.Version < 1 || e.Version > r.version {
		return e.Record, fmt.Errorf("schema version %d, this program reads 1 to %d: run the version that wrote it", e.Version, r.version)
	}
	return e.Record, nil
}

// SetAside moves the record of id into the quarantine directory, for a reason
// that the reader of the record found. Where it cannot be moved it stays, and
// the reason says so.
func (r *Records[T]) SetAside(id string, reason error) Bad {
	to := filepath.Join(r.directory, quarantine, id+suffix)
	err := os.MkdirAll(filepath.Dir(to), 0o700)
	if err == nil {
		err = os.Rename(r.Path(id), to)
	}
	if err != nil {
		return Bad{ID: id, Path: r.Path(id), Reason: errors.Join(reason, err)}
	}
	return Bad{ID: id, Path: to, Reason: reason}
}

// Quarantined lists the records that were set aside, now or earlier.
func (r *Records[T]) Quarantined() []string {
	paths, err := filepath.Glob(filepath.Join(r.directory, quarantine, "*"+suffix))
	if err != nil {
		return nil
	}
	return paths
}

// IDs lists whose records stand in a directory, without reading them; none if
// there is no such directory. It changes nothing, so it may be asked beside
// the process that writes them.
func IDs(directory string) ([]string, error) {
	entries, err := os.ReadDir(directory)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var ids []string
	for _, entry := range entries {
		if id, isRecord := strings.CutSuffix(entry.Name(), suffix); isRecord && !entry.IsDir() && !IsTemporary(id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Peek reads one record of a directory that another process writes.
func Peek[T any](directory, id string) (T, error) {
	return (&Records[T]{directory: directory, version: math.MaxInt}).read(id)
}
