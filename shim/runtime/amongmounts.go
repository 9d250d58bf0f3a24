package runtime

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
)

// amongMounts runs start on a thread for which nothing is mounted but what is at the
// paths; where that cannot be had it was not started. The mounts are those of the
// node, not copies on their own: what is shared with the node, for a volume with
// Bidirectional, stays so.
func (b *Builtin) amongMounts(paths []mountedPath, start func() error) (started bool, err error) {
	empty, err := b.openEmptyMounts()
	if err != nil {
		return false, err
	}
	defer empty.Close()
	trees, err := openTrees(paths)
	defer closeAll(trees)
	if err != nil {
		return false, err
	}
	err = namespace.OnDisposableThread(func() error {
		if err := enterCopy(empty); err != nil {
			return fmt.Errorf("enter an empty mount namespace: %w", err)
		}
		for i, tree := range trees {
			if err := moveTo(tree, paths[i].path); err != nil {
				return fmt.Errorf("mount %s for a start: %w", paths[i].path, err)
			}
		}
		started = true
		return start()
	})
	return started, err
}

// resolveCached is RESOLVE_CACHED of openat2(2), since Linux 5.12.
const resolveCached = 0x20

// cachedRetries is how often it is tried again, of which each takes some microseconds.
const cachedRetries = 20

// openTrees opens what is at the paths, as far as the kernel finds it without asking
// a file system: libcontainer's init can be killed while it waits for one whose server
// hangs, this process cannot, nor execute the next build meanwhile.
func openTrees(paths []mountedPath) (trees []*os.File, err error) {
	for _, p := range paths {
		tree, err := openCachedTree(p)
		if err != nil {
			return trees, err
		}
		trees = append(trees, tree)
	}
	return trees, nil
}

func openCachedTree(p mountedPath) (*os.File, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: resolveCached}
	if slices.Contains(nodeTrees[:], p.path) {
		how.Resolve = 0 // no server's; that a symlink is read is noted in it once a day
	}
	found, err := unix.Openat2(unix.AT_FDCWD, p.path, &how)
	// A mount elsewhere in the middle of it ends it, too.
	for range cachedRetries {
		if !errors.Is(err, unix.EAGAIN) {
			break
		}
		found, err = unix.Openat2(unix.AT_FDCWD, p.path, &how)
	}
	if err != nil {
		return nil, &os.PathError{Op: "openat2", Path: p.path, Err: err}
	}
	defer unix.Close(found)
	flags := uint(unix.AT_EMPTY_PATH | unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if p.recursive {
		flags |= unix.AT_RECURSIVE
	}
	tree, err := unix.OpenTree(found, "", flags)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: p.path, Err: err}
	}
	return os.NewFile(uintptr(tree), p.path), nil
}

func closeAll(files []*os.File) {
	for _, file := range files {
		_ = file.Close()
	}
}

// enterCopy gives the thread a copy of a mount namespace with a tmpfs as its root: the
// files of the one that it has are those of all copies. The mounts end with the last
// that uses them.
func enterCopy(of *os.File) error {
	root, err := newTmpfs()
	if err != nil {
		return err
	}
	defer unix.Close(root)
	// Threads share the working directory, and one that does cannot join.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(of.Fd()), unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns", err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return os.NewSyscallError("move_mount", err)
	}
	if err := unix.Fchdir(root); err != nil {
		return os.NewSyscallError("fchdir", err)
	}
	return os.NewSyscallError("chroot", unix.Chroot("."))
}

func newTmpfs() (int, error) {
	context, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(context)
	err = errors.Join(unix.FsconfigSetString(context, "mode", "0755"), unix.FsconfigCreate(context))
	if err != nil {
		return -1, os.NewSyscallError("fsconfig", err)
	}
	made, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	return made, os.NewSyscallError("fsmount", err)
}

// moveTo mounts a tree on a path that is made for it.
func moveTo(tree *os.File, path string) error {
	// What a file is never changes: its server is not asked.
	var info unix.Statx_t
	if err := unix.Statx(int(tree.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &info); err != nil {
		return os.NewSyscallError("statx", err)
	}
	isDir := info.Mode&unix.S_IFMT == unix.S_IFDIR
	dir := path
	if !isDir {
		dir = filepath.Dir(path)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if !isDir {
		if err := unix.Mknod(path, unix.S_IFREG|0o444, 0); err != nil && !errors.Is(err, fs.ErrExist) {
			return &os.PathError{Op: "mknod", Path: path, Err: err}
		}
	}
	err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
	return os.NewSyscallError("move_mount", err)
}
