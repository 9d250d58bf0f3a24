package sweep

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/state"
)

// Remove removes an orphan by what the kernel and the disk show, without a
// daemon. The snapshot below a container's files stays: it is the image store's,
// which removes it with its daemon's next start.
func (p *Places) Remove(o Orphan) error {
	switch o.Kind {
	case ContainerCgroup, PodCgroup:
		return p.Hierarchies.Remove(o.Path, p.Kill)
	case Netns:
		return p.Netns.Remove(o.ID)
	case Userns:
		return p.Userns.Remove(o.ID)
	}
	if err := unmountAll(o.Path); err != nil {
		return err
	}
	if err := state.RemoveAll(o.Path); err != nil {
		return fmt.Errorf("remove %s: %w", o.Kind, err)
	}
	return nil
}

// unmountAll unmounts what is mounted at a directory and below it, the topmost
// mount first.
func unmountAll(dir string) error {
	parent, err := filepath.EvalSymlinks(filepath.Dir(dir)) // as mountinfo shows it
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Join(parent, filepath.Base(dir))))
	if err != nil {
		return err
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		err := unix.Unmount(mounts[i].Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // unmounted meanwhile
			return fmt.Errorf("unmount %s: %w", mounts[i].Mountpoint, err)
		}
	}
	return nil
}
