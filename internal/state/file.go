package state

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
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
	if err := failpoint.Hit("rename " + filepath.Base(filepath.Dir(path))); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if err := os.Rename(temporary, path); err != nil {
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
