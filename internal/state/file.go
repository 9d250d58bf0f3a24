// Package state keeps records on disk: one small JSON file for each object,
// in one directory for each kind of object.
//
// A write goes to a temporary file that is renamed over the old one, so a reader, and a
// daemon that comes back after a crash, finds the old record or the new one. A durable
// write survives a power cut when it has returned.
//
// Every file carries the version of its schema. A record that cannot be decoded
// (truncated, garbage, or of no schema) is moved to the directory "quarantine" next
// to the records; one that cannot be read now stays where it is. Neither stops the
// others from being read.
//
// The package has no lock, and no state in memory but the ids that Objects leaves
// alone: writers of one record are kept apart by the object that it belongs to.
package state

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/step/failpoint"
)

// ReadFile reads a file, and nothing else: what stands in its place, a directory or
// a fifo, is an error and does not block.
func ReadFile(path string) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file, its mode is %v", path, info.Mode())
	}
	return io.ReadAll(file)
}

// WriteFile replaces the file at path with data in one step. With durable it
// returns only when the data and the name are on the disk (fsync(2) of the
// file and of its directory).
func WriteFile(path string, data []byte, durable bool) error {
	temporary, err := writeTemporary(path, data, durable)
	if err != nil {
		return err
	}
	err = failpoint.Hit("rename " + filepath.Base(filepath.Dir(path)))
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if !durable {
		return nil
	}
	return syncFile(filepath.Dir(path))
}

func writeTemporary(path string, data []byte, durable bool) (string, error) {
	file, err := os.CreateTemp(filepath.Dir(path), temporaryPrefix+filepath.Base(path)+"-*")
	if err != nil {
		return "", err
	}
	_, err = file.Write(data)
	if err == nil && durable {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(err, os.Remove(file.Name()))
	}
	return file.Name(), nil
}

// ClearTemporary removes the temporary files of writes to a directory that were
// cut off. No other process may write there.
func ClearTemporary(directory string) error {
	entries, err := os.ReadDir(directory)
	for _, entry := range entries {
		if IsTemporary(entry.Name()) {
			err = errors.Join(err, os.Remove(filepath.Join(directory, entry.Name())))
		}
	}
	if err != nil {
		return fmt.Errorf("clear writes that were cut off: %w", err)
	}
	return nil
}

// IsTemporary reports whether a file's name is that of a write that has not come
// to its end, or was cut off.
func IsTemporary(name string) bool { return strings.HasPrefix(name, temporaryPrefix) }

// RemoveAll is os.RemoveAll, save that what is not there is no error on a
// file system that cannot be written, either: unlink(2) and rmdir(2) say EROFS
// before they look.
func RemoveAll(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return os.RemoveAll(path)
}

// syncFile waits until the file, or the names of a directory, are on the disk.
func syncFile(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	return nil
}

// quarantine is the directory, next to the records, of those that cannot be
// decoded. What such a record describes is left alone for as long as it is there.
const quarantine = "quarantine"

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

// Retry puts a record in quarantine back among the others if it can be decoded as a T by
// now: an administrator may have repaired it. The daemon that starts next reads it.
func Retry[T any](path string) error {
	directory := filepath.Dir(filepath.Dir(path))
	data, err := ReadFile(path)
	if err != nil {
		return err
	}
	if _, err := (&Records[T]{directory: directory, version: math.MaxInt}).decode(path, data); err != nil {
		return err
	}
	to := filepath.Join(directory, filepath.Base(path))
	if err := os.Link(path, to); err != nil { // one that is there is not replaced
		return err
	}
	return GiveUp(path)
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
