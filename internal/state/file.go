// Package state keeps records on disk: one small JSON file for each object,
// in one directory for each kind of object.
//
// It owns the files below the directories that it is given and nothing else.
// A write goes to a temporary file that is renamed over the old one, so a
// reader, and a daemon that comes back after a crash, finds the old record or
// the new one, never half of one. A durable write is also on the disk when it
// returns (fsync of the file and of its directory), so that it survives a power
// cut.
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
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
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
	return writeFile(path, data, durable, os.Rename)
}

// writeFile writes a temporary file, and has rename put it in its place.
func writeFile(path string, data []byte, durable bool, rename func(from, to string) error) error {
	temporary, err := writeTemporary(path, data, durable)
	if err != nil {
		return err
	}
	if err := failpoint.Hit("rename " + filepath.Base(filepath.Dir(path))); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if err := rename(temporary, path); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if !durable {
		return nil
	}
	return syncFile(filepath.Dir(path))
}

// renameOver is rename(2) to a name that exists: fs.ErrNotExist if another process has
// removed it. A file system that cannot exchange two names is asked beforehand.
func renameOver(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	if err == nil {
		return os.Remove(from) // what was there before
	}
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) {
		return &os.LinkError{Op: "renameat2", Old: from, New: to, Err: err}
	}
	if _, err := os.Lstat(to); err != nil {
		return err
	}
	return os.Rename(from, to)
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
	if err != nil {
		return fmt.Errorf("look for writes that were cut off: %w", err)
	}
	for _, entry := range entries {
		if !IsTemporary(entry.Name()) {
			continue
		}
		if err := os.Remove(filepath.Join(directory, entry.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("clear a write that was cut off: %w", err)
		}
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
	path := filepath.Join(r.directory, quarantine, id+suffix)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return GiveUp(path)
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
