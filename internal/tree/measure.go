package tree

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Usage is what a tree takes on its file system.
type Usage struct{ Bytes, Inodes int64 }

// Measure adds up the blocks and the inodes of a tree, the directory at path with
// them. A file with several links counts once.
func Measure(ctx context.Context, path string) (Usage, error) {
	root, err := unix.Open(path, directory, 0)
	if err != nil {
		return Usage{}, fmt.Errorf("measure %s: %w", path, err)
	}
	w := &walk{root: root, at: -1, linked: map[inode]bool{}}
	defer w.close()
	if err := w.run(ctx); err != nil {
		return Usage{}, fmt.Errorf("measure %s: %w", path, err)
	}
	return w.usage, nil
}

// walk goes through a tree, depth first. It holds the descriptors of the root and of
// one directory, and comes back up by "..".
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
	name     string
	id       inode
	left     []string // directories to go through, of those that were read so far
	position int64    // where to go on reading
	read     bool     // to the end
}

type inode struct{ device, number uint64 }

func inodeOf(stat *unix.Stat_t) inode { return inode{uint64(stat.Dev), stat.Ino} }

// maxReopened limits what a container can cost that moves its directories while they
// are gone through.
const maxReopened = 1 << 20

var errUnsteady = errors.New("its directories are moved faster than they can be measured")

func (w *walk) run(ctx context.Context) error {
	if err := w.enter(w.root, "."); err != nil {
		return err
	}
	for ctx.Err() == nil {
		last := &w.levels[len(w.levels)-1]
		var err error
		switch {
		case len(last.left) > 0:
			name := last.left[len(last.left)-1]
			last.left = last.left[:len(last.left)-1]
			if err = w.enter(w.at, name); isGone(err) {
				err = nil
			}
		case !last.read:
			err = w.readMore(last)
		case len(w.levels) == 1:
			return nil
		default:
			err = w.leave()
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// isGone reports whether a name is that of a directory no more.
func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// enter goes down into a directory, and counts it.
func (w *walk) enter(parent int, name string) error {
	fd, err := unix.Openat(parent, name, directory, 0)
	if err != nil {
		return err
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	w.moveTo(fd)
	w.count(&stat)
	w.levels = append(w.levels, level{name: name, id: inodeOf(&stat)})
	return nil
}

// readMore counts the next files of the directory, and notes the directories.
func (w *walk) readMore(last *level) error {
	names, err := readNames(w.at, w.buffer[:])
	if isGone(err) { // it was removed
		names, err = nil, nil
	}
	if err != nil {
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
	last.position, err = unix.Seek(w.at, 0, unix.SEEK_CUR)
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

// leave goes up to the directory that the walk came from, which ".." is not if the
// one below was moved meanwhile.
func (w *walk) leave() error {
	w.levels = w.levels[:len(w.levels)-1]
	last := &w.levels[len(w.levels)-1]
	fd, err := w.open(w.at, "..", last.id)
	if err != nil {
		return w.reopen()
	}
	w.moveTo(fd)
	return w.resume()
}

// reopen goes down from the root to the last level, or to the last one that is still
// where it was.
func (w *walk) reopen() error {
	if w.reopened += len(w.levels); w.reopened > maxReopened {
		return errUnsteady
	}
	fd, err := w.open(w.root, ".", w.levels[0].id)
	if err != nil {
		return err
	}
	for i := 1; i < len(w.levels); i++ {
		next, err := w.open(fd, w.levels[i].name, w.levels[i].id)
		if err != nil {
			w.levels = w.levels[:i]
			break
		}
		_ = unix.Close(fd)
		fd = next
	}
	w.moveTo(fd)
	return w.resume()
}

// open opens a directory if it is the one that was meant.
func (w *walk) open(parent int, name string, id inode) (int, error) {
	fd, err := unix.Openat(parent, name, directory, 0)
	if err != nil {
		return -1, err
	}
	var stat unix.Stat_t
	if err = unix.Fstat(fd, &stat); err == nil && inodeOf(&stat) != id {
		err = unix.ENOENT
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// resume goes on reading where the walk was before it went down.
func (w *walk) resume() error {
	last := &w.levels[len(w.levels)-1]
	if last.read {
		return nil
	}
	_, err := unix.Seek(w.at, last.position, unix.SEEK_SET)
	return err
}

func (w *walk) moveTo(fd int) {
	if w.at >= 0 {
		_ = unix.Close(w.at) // read only: nothing is lost
	}
	w.at = fd
}

func (w *walk) close() {
	w.moveTo(-1)
	_ = unix.Close(w.root)
}
