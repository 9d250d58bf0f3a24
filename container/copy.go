package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// copyTree copies what an image has in a directory: files with their holes, links, fifos, owners, modes, times and
// extended attributes. It leaves out sockets, and device nodes, which would work on a file system of the node. It stops
// when ctx ends, and leaves a part of the target's file system to others: a small image can have large files.
func copyTree(ctx context.Context, target, source string) error {
	t := treeCopy{ctx: ctx, buffer: make([]byte, 256<<10), links: make(map[uint64]string)}
	err := filepath.WalkDir(source, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return t.entry(target+strings.TrimPrefix(path, source), path)
	})
	for _, finish := range slices.Backward(t.directories) { // whose times change with what is made in them
		if err == nil {
			err = finish()
		}
	}
	return err
}

type treeCopy struct {
	ctx         context.Context
	buffer      []byte
	links       map[uint64]string // the copies of files with several names, by inode
	directories []func() error    // set their attributes
}

func (t *treeCopy) entry(target, source string) error {
	if t.ctx.Err() != nil {
		return context.Cause(t.ctx)
	}
	var stat unix.Stat_t
	if err := unix.Lstat(source, &stat); err != nil {
		return &fs.PathError{Op: "lstat", Path: source, Err: err}
	}
	if err := checkRoom(filepath.Dir(target), stat.Blocks*512); err != nil {
		return err
	}
	var err error
	kind := stat.Mode & unix.S_IFMT
	switch kind {
	case unix.S_IFDIR:
		if err = os.Mkdir(target, 0o700); errors.Is(err, fs.ErrExist) {
			err = nil // the root
		}
		t.directories = append(t.directories, func() error { return copyAttributes(target, source, &stat) })
		return err
	case unix.S_IFREG:
		if other := t.links[stat.Ino]; other != "" {
			return os.Link(other, target)
		}
		if stat.Nlink > 1 {
			t.links[stat.Ino] = target
		}
		err = t.file(target, source, stat.Size)
	case unix.S_IFLNK:
		var to string
		if to, err = os.Readlink(source); err == nil {
			err = os.Symlink(to, target)
		}
	case unix.S_IFIFO:
		err = unix.Mkfifo(target, 0o600)
	default:
		return nil
	}
	if err != nil {
		return err
	}
	return copyAttributes(target, source, &stat)
}

// file copies the content of a file without its holes.
func (t *treeCopy) file(target, source string, size int64) error {
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(target, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer to.Close()
	for data := int64(0); data < size; {
		if data, err = from.Seek(data, unix.SEEK_DATA); errors.Is(err, unix.ENXIO) {
			break // a hole up to the end
		}
		hole := size
		if err == nil {
			hole, err = from.Seek(data, unix.SEEK_HOLE)
		} else if errors.Is(err, unix.EINVAL) { // the file system has no holes
			data, err = 0, nil
		}
		section, into := io.NewSectionReader(from, data, hole-data), io.NewOffsetWriter(to, data)
		for n := 1; n > 0 && err == nil; {
			if t.ctx.Err() != nil {
				return context.Cause(t.ctx)
			}
			if n, err = section.Read(t.buffer); err == nil {
				_, err = into.Write(t.buffer[:n])
			}
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		data = hole
	}
	return to.Truncate(size)
}

// copyAttributes sets owner, mode, times and, where the file system has them, extended attributes. The owner comes
// first: its change clears set-user-ID and file capabilities.
func copyAttributes(target, source string, stat *unix.Stat_t) error {
	if err := os.Lchown(target, int(stat.Uid), int(stat.Gid)); err != nil {
		return err
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Chmod(target, stat.Mode&^unix.S_IFMT); err != nil {
			return &fs.PathError{Op: "chmod", Path: target, Err: err}
		}
	}
	names := make([]byte, 64<<10)
	n, _ := unix.Llistxattr(source, names)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:max(n, 0)]), "\x00"), "\x00") {
		value := make([]byte, 64<<10)
		if n, err := unix.Lgetxattr(source, name, value); name != "" && err == nil {
			_ = unix.Lsetxattr(target, name, value[:n], 0) // a file system without them holds all the rest
		}
	}
	times := []unix.Timespec{stat.Atim, stat.Mtim}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, target, times, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		err = &fs.PathError{Op: "utimensat", Path: target, Err: err}
	}
	return err
}

// checkRoom returns an error unless a file of that size leaves a twentieth of the file system, at most 1 GiB.
func checkRoom(dir string, size int64) error {
	var disk syscall.Statfs_t
	if err := syscall.Statfs(dir, &disk); err != nil {
		return fmt.Errorf("measure the free space of %s: %w", dir, err)
	}
	free, reserve := int64(disk.Bavail)*disk.Bsize, min(int64(disk.Blocks)*disk.Bsize/20, 1<<30)
	if size > free-reserve || disk.Files > 0 && disk.Ffree <= disk.Files/20 {
		return fmt.Errorf("%d bytes and %d inodes are free on the file system of %s, and a twentieth stays free: "+
			"free some space: %w", free, disk.Ffree, dir, errdefs.ErrResourceExhausted)
	}
	return nil
}
