package image

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

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

const (
	// unmountDelay keeps what the end of a file system writes, all that there is to
	// write, out of the way of what is written for its removal, which is waited for.
	unmountDelay = time.Second
	// maxUnmounted limits the descriptors that wait for that, or for a slow disk.
	maxUnmounted = 64
)

// unmounted ends file systems that are mounted nowhere any more, one after the other:
// what the first has written to the disk the next finds written. It has a goroutine
// while there are any, which wait waits for.
type unmounted struct {
	hurry chan struct{} // of one place: nothing is to be delayed

	mu      sync.Mutex // guards pending
	pending []int      // descriptors of detached mounts; the first is the next to be closed
	closed  *sync.Cond // one of them was
}

func newUnmounted() *unmounted {
	u := &unmounted{hurry: make(chan struct{}, 1)}
	u.closed = sync.NewCond(&u.mu)
	return u
}

// end has the last reference to a file system closed, and waits for that only behind a
// disk that is too slow for what is removed.
func (u *unmounted) end(last int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for len(u.pending) >= maxUnmounted {
		u.closed.Wait()
	}
	u.pending = append(u.pending, last)
	switch len(u.pending) {
	case 1:
		go u.closeAll()
	case maxUnmounted / 2:
		u.hurryUp()
	}
}

// hurryUp ends a delay, the present one or the next.
func (u *unmounted) hurryUp() {
	select {
	case u.hurry <- struct{}{}:
	default:
	}
}

// closeAll returns when there are none any more.
func (u *unmounted) closeAll() {
	select {
	case <-time.After(unmountDelay):
	case <-u.hurry:
	}
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
		u.hurryUp()
		u.closed.Wait()
	}
}
