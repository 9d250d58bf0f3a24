// Package tree measures and removes directory trees that containers have written, deeper than PATH_MAX too, with a
// constant number of descriptors and in a time that grows with the number of files. It has no state. A tree may
// change while it is measured; one that is removed must have no other user.
package tree

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	directory = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	batch     = 16 << 10 // bytes of a directory that are read at a time
)

// readNames reads the next names of a directory, none at its end.
func readNames(fd int, buffer []byte) (names []string, err error) {
	for len(names) == 0 {
		n, err := unix.ReadDirent(fd, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return nil, err
		}
		_, _, names = unix.ParseDirent(buffer[:n], -1, nil)
	}
	return names, nil
}

// Usage is what a tree takes on its file system.
type Usage struct{ Bytes, Inodes int64 }

// Measure adds up the blocks and inodes of the tree at path, its root among them. A file
// with several links counts once.
func Measure(ctx context.Context, path string) (Usage, error) {
	root, err := unix.Open(path, directory, 0)
	if err != nil {
		return Usage{}, fmt.Errorf("measure %s: %w", path, err)
	}
	w := &walk{root: root, at: -1, linked: map[inode]bool{}}
	defer func() {
		w.moveTo(-1)
		_ = unix.Close(root)
	}()
	if err := w.run(ctx); err != nil {
		return Usage{}, fmt.Errorf("measure %s: %w", path, err)
	}
	return w.usage, nil
}

// walk goes through a tree, depth first, with the descriptors of the root and of one
// directory, and comes back up by "..".
type walk struct {
	root, at int
	levels   []level // from the root to the directory at
	usage    Usage
	linked   map[inode]bool // files with several links that were counted
	buffer   [batch]byte
	reopened int // directories that were looked up again
}

// level is a directory on the way from the root to the one that is read.
type level struct {
	name string
	id   inode
	left []string // directories to go through, of the batch that was read last
	next int64    // where to go on reading
	read bool     // to the end
}

type inode struct{ device, number uint64 }

func inodeOf(stat *unix.Stat_t) inode { return inode{uint64(stat.Dev), stat.Ino} }

const maxReopened = 1 << 20 // bounds what a container costs that moves directories meanwhile

var errUnsteady = errors.New("its directories are moved faster than they can be measured")

func (w *walk) run(ctx context.Context) error {
	err := w.enter(w.root, ".")
	for err == nil && ctx.Err() == nil {
		last := &w.levels[len(w.levels)-1]
		if end := len(last.left) - 1; end >= 0 {
			name := last.left[end]
			last.left = last.left[:end]
			if err = w.enter(w.at, name); isGone(err) {
				err = nil
			}
			continue
		}
		if !last.read {
			err = w.readMore(last)
			continue
		}
		if len(w.levels) == 1 {
			return nil
		}
		err = w.leave()
	}
	return errors.Join(err, ctx.Err())
}

func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// enter goes down into a directory, and counts it.
func (w *walk) enter(parent int, name string) error {
	fd, stat, err := open(parent, name)
	if err != nil {
		return err
	}
	w.moveTo(fd)
	w.count(stat)
	w.levels = append(w.levels, level{name: name, id: inodeOf(stat)})
	return nil
}

// readMore counts the next files, and notes the directories among them: a batch, because a container makes
// as many as it likes.
func (w *walk) readMore(last *level) error {
	if _, err := unix.Seek(w.at, last.next, unix.SEEK_SET); err != nil {
		return err
	}
	names, err := readNames(w.at, w.buffer[:])
	if err != nil && !isGone(err) { // gone: it was removed
		return err
	}
	last.read = len(names) == 0
	for _, name := range names {
		var stat unix.Stat_t
		err := unix.Fstatat(w.at, name, &stat, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case isGone(err):
		case err != nil:
			return err
		case stat.Mode&unix.S_IFMT == unix.S_IFDIR:
			last.left = append(last.left, name)
		default:
			w.count(&stat)
		}
	}
	last.next, err = unix.Seek(w.at, 0, unix.SEEK_CUR)
	return err
}

func (w *walk) count(stat *unix.Stat_t) {
	if stat.Nlink > 1 && stat.Mode&unix.S_IFMT != unix.S_IFDIR {
		if w.linked[inodeOf(stat)] {
			return
		}
		w.linked[inodeOf(stat)] = true
	}
	w.usage.Inodes++
	w.usage.Bytes += stat.Blocks * 512
}

// leave goes up to the directory that the walk came from. If that is not "..", because the
// one below was moved, it goes down from the root to the last directory that is in place.
func (w *walk) leave() error {
	w.levels = w.levels[:len(w.levels)-1]
	if fd, err := openIf(w.at, "..", w.levels[len(w.levels)-1].id); err == nil {
		w.moveTo(fd)
		return nil
	}
	if w.reopened += len(w.levels); w.reopened > maxReopened {
		return errUnsteady
	}
	fd, err := openIf(w.root, ".", w.levels[0].id)
	if err != nil {
		return err
	}
	for i := 1; i < len(w.levels); i++ {
		next, err := openIf(fd, w.levels[i].name, w.levels[i].id)
		if err != nil {
			w.levels = w.levels[:i]
			break
		}
		_ = unix.Close(fd)
		fd = next
	}
	w.moveTo(fd)
	return nil
}

func open(parent int, name string) (int, *unix.Stat_t, error) {
	fd, err := unix.Openat(parent, name, directory, 0)
	if err != nil {
		return -1, nil, err
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return -1, nil, errors.Join(err, unix.Close(fd))
	}
	return fd, &stat, nil
}

// openIf opens a directory if it is the one that was meant.
func openIf(parent int, name string, id inode) (int, error) {
	fd, stat, err := open(parent, name)
	if err == nil && inodeOf(stat) != id {
		return -1, errors.Join(unix.ENOENT, unix.Close(fd))
	}
	return fd, err
}

func (w *walk) moveTo(fd int) {
	if w.at >= 0 {
		_ = unix.Close(w.at) // read only: nothing is lost
	}
	w.at = fd
}

const maxDepth = 32 // levels that are open during a removal, a descriptor each

// Remove removes a file or a directory with all that is in it, if it is there. It goes on
// after an error, and returns the first.
func Remove(path string) error { return (&remover{top: -1}).all(path) }

// Discard is Remove, and empties large files, so that their blocks are free even while something has them open, such as
// an overlay that is being unmounted. No process may need them any more.
func Discard(path string) error { return (&remover{top: -1, empties: true}).all(path) }

func (r *remover) all(path string) error {
	if err := r.remove(unix.AT_FDCWD, path, 0); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// remover empties a directory. It moves what is deeper than maxDepth to the top and goes down from there.
type remover struct {
	top     int // the directory that is removed, -1 before it is opened
	moved   int
	empties bool // large files
}

func (r *remover) remove(parent int, name string, depth int) error {
	err := r.unlink(parent, name)
	if !isFull(err) {
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
	if depth == 0 {
		r.top = fd
	}
	if err := r.empty(fd, depth+1); err != nil {
		return err
	}
	return r.unlink(parent, name)
}

func isFull(err error) bool { return errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) }

const large = 1 << 20 // bytes of a file that is worth two system calls more

// unlink removes a file or an empty directory, if it is there. It looks first, because
// unlink(2) says EROFS also of what is not there.
func (r *remover) unlink(parent int, name string) error {
	var stat unix.Stat_t
	err := unix.Fstatat(parent, name, &stat, unix.AT_SYMLINK_NOFOLLOW)
	flags, file := 0, -1
	switch kind := stat.Mode & unix.S_IFMT; {
	case kind == unix.S_IFDIR:
		flags = unix.AT_REMOVEDIR
	case r.empties && kind == unix.S_IFREG && stat.Nlink == 1 && stat.Size >= large:
		if file, _ = unix.Openat(parent, name, unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0); file >= 0 {
			defer unix.Close(file)
		}
	}
	if err == nil {
		err = unix.Unlinkat(parent, name, flags)
	}
	if err == nil && file >= 0 {
		_ = unix.Ftruncate(file, 0)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// empty removes all that is in a directory, and reads it again until a round removes nothing.
func (r *remover) empty(fd, depth int) error {
	buffer := make([]byte, batch)
	for {
		removed, first := 0, error(nil)
		for {
			names, err := readNames(fd, buffer)
			if err != nil {
				return errors.Join(first, err)
			}
			if len(names) == 0 {
				break
			}
			for _, name := range names {
				if err := r.remove(fd, name, depth); err == nil {
					removed++
				} else if first == nil {
					first = fmt.Errorf("%q: %w", name, err)
				}
			}
		}
		if removed == 0 {
			return first
		}
		if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
			return err
		}
	}
}

// moveToTop gives a directory a name of its own in the top one.
func (r *remover) moveToTop(parent int, name string) error {
	for {
		r.moved++
		err := unix.Renameat(parent, name, r.top, "moved-"+strconv.Itoa(r.moved))
		if !isFull(err) && !errors.Is(err, unix.ENOTDIR) {
			return err
		}
	}
}
