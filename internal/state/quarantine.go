package state

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// quarantine is the directory, next to the records, of those that cannot be
// decoded. What such a record describes is left alone for as long as it is there.
const quarantine = "quarantine"

// mostQuarantined is how many records of a kind stay in quarantine. The oldest
// are removed first, and what they described is an orphan then.
const mostQuarantined = 256

// Quarantine moves the record of id into quarantine, for a reason that the reader
// of the record found. Where it cannot be moved it stays, and the reason says so.
func (r *Records[T]) Quarantine(id string, reason error) Bad {
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

// Quarantined lists the records that are in quarantine, since now or earlier.
func (r *Records[T]) Quarantined() []string {
	paths, _ := Quarantined(r.directory) // what cannot be listed cannot be shown
	return paths
}

// Quarantined lists the files in quarantine next to the records of a directory.
// After an error any record may be among them.
func Quarantined(directory string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(directory, quarantine))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the records in quarantine: %w", err)
	}
	var paths []string
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), suffix) {
			paths = append(paths, filepath.Join(directory, quarantine, entry.Name()))
		}
	}
	return paths, nil
}

// IDOf is whose record a file is.
func IDOf(path string) string { return strings.TrimSuffix(filepath.Base(path), suffix) }

// removeQuarantined removes a record from quarantine, and the directory with the
// last one.
func (r *Records[T]) removeQuarantined(id string) error {
	dir := filepath.Join(r.directory, quarantine)
	if _, err := os.Lstat(filepath.Join(dir, id+suffix)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := os.Remove(filepath.Join(dir, id+suffix)); err != nil {
		return err
	}
	_ = os.Remove(dir) // fails while there are others
	return nil
}

func (r *Records[T]) trimQuarantine() error {
	paths, err := Quarantined(r.directory)
	if err != nil || len(paths) <= mostQuarantined {
		return err
	}
	changed := func(path string) int64 {
		info, err := os.Lstat(path)
		if err != nil {
			return 0
		}
		return info.ModTime().UnixNano()
	}
	slices.SortFunc(paths, func(a, b string) int { return cmp.Compare(changed(a), changed(b)) })
	var errs []error
	for _, path := range paths[:len(paths)-mostQuarantined] {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// Retry puts a record in quarantine back among the others if it can be decoded
// as a T by now, an administrator may have repaired it; the daemon that starts next reads
// it. It does not replace a record that is there.
func Retry[T any](path string, version int) error {
	directory := filepath.Dir(filepath.Dir(path))
	data, err := ReadFile(path)
	if err != nil {
		return err
	}
	if _, err := (&Records[T]{directory: directory, version: version}).decode(path, data); err != nil {
		return err
	}
	to := filepath.Join(directory, filepath.Base(path))
	if _, err := os.Lstat(to); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is there already", to)
	}
	if err := os.Rename(path, to); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(path)) // fails while there are others
	return nil
}

// GiveUp removes a record in quarantine: the daemon that starts next takes what it
// described for orphans.
func GiveUp(path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(path)) // fails while there are others
	return nil
}
