package image

import (
	"errors"
	"fmt"
	"os"
	"sync"

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
		defer s.unmounted.end(last)
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

// maxUnmounted limits the descriptors that wait for a slow disk.
const maxUnmounted = 64

// unmounted ends file systems that are mounted nowhere any more, one after the other:
// what the first has written to the disk the next finds written. It has a goroutine
// while there are any, which wait waits for.
type unmounted struct {
	mu      sync.Mutex // guards pending
	pending []int      // descriptors of detached mounts; the first is being closed
	closed  *sync.Cond // one of them was
}

func newUnmounted() *unmounted {
	u := &unmounted{}
	u.closed = sync.NewCond(&u.mu)
	return u
}

// end closes the last reference to a file system, and waits for it only behind a disk
// that is too slow for what is removed.
func (u *unmounted) end(last int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for len(u.pending) >= maxUnmounted {
		u.closed.Wait()
	}
	u.pending = append(u.pending, last)
	if len(u.pending) == 1 {
		go u.closeAll()
	}
}

// closeAll returns when there are none any more.
func (u *unmounted) closeAll() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for len(u.pending) > 0 {
		last := u.pending[0]
		u.mu.Unlock()
		_ = unix.Close(last) // a descriptor of ours: that cannot fail
		u.mu.Lock()
		u.pending = u.pending[1:]
		u.closed.Broadcast()
	}
}

// wait returns when all have ended: what is below them can be unmounted then.
func (u *unmounted) wait() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for len(u.pending) > 0 {
		u.closed.Wait()
	}
}
