package crilog

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// split parts a path into what may have symbolic links and what may not: only its
// last element if it is not one of api.GuardedPath.
func split(path string) (base, name string) {
	if base, name, found := strings.Cut(path, api.PathGuard); found {
		return base, name
	}
	return filepath.Split(path)
}

// openTries is how often a file may come or go while it is opened.
const openTries = 10

// openFile makes the file, or opens the one that is there: by O_PATH, which
// opens no fifo and no device, and then by its descriptor, so that what was
// looked at is what is opened (open(2), proc_pid_fd(5)).
func openFile(path string) (file *os.File, err error) {
	base, name := split(path)
	directory, err := os.OpenFile(filepath.Clean(base), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer directory.Close()
	for range openTries {
		file, err = openBelow(directory, name, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_EXCL, 0o640)
		if !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.EAGAIN) {
			return file, err
		}
		file, err = openExisting(directory, name)
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EAGAIN) {
			return file, err
		}
	}
	return nil, err
}

// openBelow opens a file of a directory, behind no symbolic link (openat2(2)).
func openBelow(directory *os.File, name string, flags, mode uint64) (*os.File, error) {
	path := filepath.Join(directory.Name(), name)
	fd, err := unix.Openat2(int(directory.Fd()), name, &unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC, Mode: mode, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("open %s: below %s there is a symbolic link, and none is followed there: %w: %w", path, directory.Name(), err, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

func openExisting(directory *os.File, name string) (*os.File, error) {
	place, err := openBelow(directory, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer place.Close()
	info, err := place.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is %v and not a regular file, remove it: %w", place.Name(), info.Mode().Type(), errdefs.ErrInvalidArgument)
	}
	file, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", place.Fd()), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", place.Name(), err)
	}
	return file, nil
}
