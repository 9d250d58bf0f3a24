// Package state keeps records on disk: one small JSON file for each object, in one directory for each kind of object.
//
// A write renames a temporary file over the old one, so readers, and a daemon after a crash,
// find the old record or the new one. A durable write survives a power cut once it returns.
//
// Every file carries the version of its schema. A record that cannot be decoded (truncated,
// garbage, or of no schema) moves to the directory "quarantine" next to the records; one that
// cannot be read now stays. Neither prevents the reading of others.
//
// The package has no lock, and no state in memory but what Objects leaves alone; the object
// that a record belongs to keeps its writers apart.
package state

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step/failpoint"
)

// ReadFile reads a regular file. A directory or a fifo in its place is an error and does not block.
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

// WriteFile replaces the file at path in one step. With durable it returns once the data and the name
// are on the disk (fsync(2) of the file and its directory).
func WriteFile(path string, data []byte, durable bool) error {
	return writeFile(path, data, durable, os.Rename, failpoint.Hit)
}

func writeFile(path string, data []byte, durable bool, put func(temporary, path string) error, hit func(string) error) error {
	temporary, err := writeTemporary(path, data, durable)
	if err != nil {
		return err
	}
	err = hit("rename " + filepath.Base(filepath.Dir(path)))
	if err == nil {
		err = put(temporary, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if !durable {
		return nil
	}
	return syncFile(filepath.Dir(path))
}

// exchange puts a file in the place of one that has to be there, in one step where the file system can (renameat2(2)).
func exchange(temporary, path string) error {
	err := unix.Renameat2(unix.AT_FDCWD, temporary, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	switch {
	case err == nil:
		return os.Remove(temporary)
	case !errors.Is(err, unix.EINVAL):
		return err
	}
	if _, err = os.Lstat(path); err != nil {
		return err
	}
	return os.Rename(temporary, path)
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

// ClearTemporary removes temporary files of interrupted writes, where no other process writes.
func ClearTemporary(directory string) error {
	entries, err := os.ReadDir(directory)
	for _, entry := range entries {
		if isTemporary(entry.Name()) {
			err = errors.Join(err, os.Remove(filepath.Join(directory, entry.Name())))
		}
	}
	if err != nil {
		return fmt.Errorf("clear writes that were cut off: %w", err)
	}
	return nil
}

// FreeLock replaces a file that a doomed process has locked (flock(2)) by a copy, which nobody has locked: the lock stays
// with the old file. The caller keeps everybody else from opening the file meanwhile.
func FreeLock(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return err
	}
	// "1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF", see proc_locks(5).
	inode := fmt.Sprintf(":%d", info.Sys().(*syscall.Stat_t).Ino)
	for line := range strings.Lines(string(locks)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[1] != "FLOCK" || !strings.HasSuffix(fields[5], inode) {
			continue
		}
		if pid, err := strconv.Atoi(fields[4]); err != nil || !process.Doomed(pid) {
			continue
		}
		content, err := ReadFile(path)
		if err == nil {
			err = WriteFile(path, content, true)
		}
		if err != nil {
			return fmt.Errorf("take %s from a process that was killed and has not ended: %w", path, err)
		}
	}
	return nil
}

// isTemporary reports whether a file name is that of a write under way, or interrupted.
func isTemporary(name string) bool { return strings.HasPrefix(name, temporaryPrefix) }

// RemoveAll is os.RemoveAll, but ignores a missing path on a read-only file system: unlink(2) says EROFS.
func RemoveAll(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return os.RemoveAll(path)
}

// syncFile waits until a file, or the names in a directory, are on the disk.
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

// quarantine is the directory of records that cannot be decoded. What they describe is left alone.
const quarantine = "quarantine"

// Quarantine moves the record of id into quarantine, for a reason, or else says that it could not.
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

// Quarantined lists the records in quarantine.
func (r *Records[T]) Quarantined() []string {
	paths, _ := Quarantined(r.directory) // what cannot be listed cannot be shown
	return paths
}

// Quarantined lists the files in quarantine in a directory. After an error any record may be among them.
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

// IDOf returns whose record a file is.
func IDOf(path string) string { return strings.TrimSuffix(filepath.Base(path), suffix) }

// Retry moves a record out of quarantine if it can be decoded as a T by now, and, where records tell by ownerOf
// whose they are, is not another's. The next daemon reads it.
func Retry[T any](path string, ownerOf func(T) string) error {
	directory := filepath.Dir(filepath.Dir(path))
	data, err := ReadFile(path)
	if err != nil {
		return err
	}
	record, err := (&Records[T]{directory: directory, version: math.MaxInt}).decode(path, data)
	if err != nil {
		return err
	}
	if ownerOf != nil && ownerOf(record) != IDOf(path) {
		return fmt.Errorf("it is the record of %s", ownerOf(record))
	}
	to := filepath.Join(directory, filepath.Base(path))
	if err := os.Link(path, to); err != nil { // replaces nothing
		return err
	}
	return GiveUp(path)
}

// GiveUp removes a record in quarantine: the next daemon takes what it described for orphans.
func GiveUp(path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(path)) // fails while there are others
	return nil
}
