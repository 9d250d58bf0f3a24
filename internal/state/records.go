package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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
	if err != nil {
		return fmt.Errorf("encode the record of %s: %w", id, err)
	}
	if err := WriteFile(r.Path(id), append(data, '\n'), durable); err != nil {
		return fmt.Errorf("write the record of %s: %w", id, err)
	}
	return nil
}

// Remove deletes the record of id, one in quarantine too; one that is not there
// is no error.
func (r *Records[T]) Remove(id string) error {
	if err := r.removeQuarantined(id); err != nil {
		return fmt.Errorf("remove the record of %s from quarantine: %w", id, err)
	}
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

// IDs lists whose records stand in a directory, without reading them; none if
// there is no such directory. It changes nothing, so it may be called beside
// the process that writes them.
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
