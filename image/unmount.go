package image

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Unmount removes all mounts at target, and the directory; a target
// that is not mounted or not there is unmounted already. A busy mount is
// detached: its last user ends it.
//
// The end of an overlay writes all of the file system below it to the disk (sync_fs
// of fs/overlayfs/super.c), for files that no process can see any more, or for those of
// others. Unmount does not wait for that: the last reference to the file system is a
// detached copy of the mount (open_tree(2)), which is closed after this returns, by
// the kernel when this process is killed. The files below may be removed meanwhile:
// nothing looks at them through the overlay any more.
func (s *Store) Unmount(target string) error {
	last, err := unix.OpenTree(unix.AT_FDCWD, target, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		defer s.closeLater(last)
	} // else the last reference is the mount itself
	if err := unmountAll(target); err != nil {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	return nil
}

func unmountAll(target string) error {
	for {
		err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// closesAtOnce limits the threads that wait for a slow disk.
const closesAtOnce = 8

// closeLater closes the last reference to a file system in the background, and waits only
// where the disk is too slow for what is removed.
func (s *Store) closeLater(last int) {
	s.unmounted.Go(func() error { return unix.Close(last) })
}
