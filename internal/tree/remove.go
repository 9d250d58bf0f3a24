package tree

import (
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxDepth is how deep a tree is gone down into. Each level takes a descriptor.
const maxDepth = 32

// Remove removes a file, or a directory with all that is in it. What is not there is
// removed already. It goes on after an error, and returns the first.
func Remove(path string) error {
	err := unlink(unix.AT_FDCWD, path)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		err = removeFull(path)
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

func removeFull(path string) error {
	top, err := unix.Open(path, directory, 0)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	r := remover{top: top}
	if err := r.empty(top, 1); err != nil {
		return err
	}
	return unlink(unix.AT_FDCWD, path)
}

// unlink removes a file or an empty directory. On a file system that cannot be
// written, what is not there is no error either: unlink(2) says EROFS before it looks.
func unlink(parent int, name string) error {
	var stat unix.Stat_t
	err := unix.Fstatat(parent, name, &stat, unix.AT_SYMLINK_NOFOLLOW)
	flags := 0
	if stat.Mode&unix.S_IFMT == unix.S_IFDIR {
		flags = unix.AT_REMOVEDIR
	}
	if err == nil {
		err = unix.Unlinkat(parent, name, flags)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// remover empties a directory. What is deeper than maxDepth it moves to the top, and
// goes down from there: that takes no descriptors and no path.
type remover struct {
	top   int
	moved int
}

// empty removes all that is in a directory. It reads it again until there is nothing
// more, or nothing that can be removed.
func (r *remover) empty(fd, depth int) error {
	buffer := make([]byte, batch)
	for {
		found, removed, err := r.pass(fd, depth, buffer)
		if found == 0 || removed == 0 {
			return err
		}
		if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
			return err
		}
	}
}

// pass removes what one reading of a directory finds.
func (r *remover) pass(fd, depth int, buffer []byte) (found, removed int, first error) {
	for {
		names, err := readNames(fd, buffer)
		if err != nil || len(names) == 0 {
			return found, removed, errors.Join(first, err)
		}
		for _, name := range names {
			found++
			if err := r.remove(fd, name, depth); err == nil {
				removed++
			} else if first == nil {
				first = fmt.Errorf("%q: %w", name, err)
			}
		}
	}
}

func (r *remover) remove(parent int, name string, depth int) error {
	err := unlink(parent, name)
	if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	if depth == maxDepth {
		return r.moveToTop(parent, name)
	}
	fd, err := unix.Openat(parent, name, directory, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := r.empty(fd, depth+1); err != nil {
		return err
	}
	return unlink(parent, name)
}

// moveToTop gives a directory a name of its own in the top one.
func (r *remover) moveToTop(parent int, name string) error {
	for {
		r.moved++
		err := unix.Renameat(parent, name, r.top, "moved-"+strconv.Itoa(r.moved))
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOTDIR) {
			return err
		}
	}
}
