package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// IDMap maps Size ids from ContainerID on to HostID on.
type IDMap struct{ ContainerID, HostID, Size uint32 }

// PrepareOptions says what a snapshot is for.
type PrepareOptions struct {
	// ReadOnly makes a snapshot without a writable layer, as for a volume that
	// is an image.
	ReadOnly bool
	// UIDs and GIDs shift the owners of files for a user namespace, by
	// id-mapped mounts. None: as they are.
	UIDs, GIDs []IDMap
}

const (
	// labelRoot keeps a snapshot whatever becomes of its image.
	labelRoot = "containerd.io/gc.root"
	// labelContainer marks the snapshots that Prepare made.
	labelContainer = "minicri/container"
)

// Prepare makes the snapshot named key (a container's id, or one for an image
// volume) on top of an image. A snapshot of that name that is there already is an
// ErrAlreadyExists; an image that is not is an ErrNotFound.
func (s *Store) Prepare(ctx context.Context, key, imageID string, options PrepareOptions) error {
	image, err := s.Get(imageID)
	if err != nil {
		return err
	}
	prepare := s.snapshots.Prepare
	if options.ReadOnly {
		prepare = s.snapshots.View
	}
	if _, err := prepare(s.scope(ctx), key, image.ChainID, snapshots.WithLabels(options.labels())); err != nil {
		return fmt.Errorf("prepare snapshot %s of image %s: %w", key, image.ID, err)
	}
	return nil
}

func (o PrepareOptions) labels() map[string]string {
	labels := map[string]string{labelRoot: "1", labelContainer: "1"}
	if len(o.UIDs) > 0 && len(o.GIDs) > 0 {
		labels[snapshots.LabelSnapshotUIDMapping] = idMaps(o.UIDs)
		labels[snapshots.LabelSnapshotGIDMapping] = idMaps(o.GIDs)
	}
	return labels
}

// idMaps is the form that the snapshotter reads; a label has at most 4096 bytes.
func idMaps(maps []IDMap) string {
	texts := make([]string, len(maps))
	for i, m := range maps {
		texts[i] = m.String()
	}
	return strings.Join(texts, ",")
}

// String is the form of /proc/PID/uid_map, with colons.
func (m IDMap) String() string {
	return fmt.Sprintf("%d:%d:%d", m.ContainerID, m.HostID, m.Size)
}

// Mount mounts a prepared snapshot at target, which it makes. All its files have
// the SELinux label, unless it is "".
func (s *Store) Mount(ctx context.Context, key, target, selinux string) error {
	mounts, err := s.snapshots.Mounts(s.scope(ctx), key)
	if err != nil {
		return fmt.Errorf("mounts of snapshot %s: %w", key, err)
	}
	if err := s.labelMounts(mounts, selinux); err != nil {
		return fmt.Errorf("label the mounts of snapshot %s: %w", key, err)
	}
	if err := os.MkdirAll(target, 0o700); err != nil {
		return fmt.Errorf("mount snapshot %s: %w", key, err)
	}
	mapped := slices.ContainsFunc(mounts, mapsIDs)
	if mapped {
		// The helper process is killed with the thread that starts it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	if err := mount.All(mounts, target); err != nil {
		return fmt.Errorf("mount snapshot %s at %s: %w", key, target, err)
	}
	if mapped {
		// containerd leaves the handle of a helper process, a descriptor, to
		// the garbage collector, which comes to an idle daemon every 2 minutes.
		runtime.GC()
	}
	return nil
}

// mapsIDs reports whether a mount is one for a user namespace (mount_setattr(2),
// MOUNT_ATTR_IDMAP).
func mapsIDs(m mount.Mount) bool {
	return slices.ContainsFunc(m.Options, func(option string) bool { return strings.HasPrefix(option, "uidmap=") })
}

// RemoveSnapshot removes a prepared snapshot; its files go in the background.
// One that is not there is removed already.
func (s *Store) RemoveSnapshot(ctx context.Context, key string) error {
	err := s.snapshots.Remove(s.scope(ctx), key)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove snapshot %s: %w", key, err)
	}
	s.usage.Delete(key)
	s.collector.soon()
	return nil
}

// Snapshots returns the keys of all prepared snapshots, to find those that no
// container owns.
func (s *Store) Snapshots(ctx context.Context) ([]string, error) {
	var keys []string
	err := s.snapshots.Walk(s.scope(ctx), func(_ context.Context, info snapshots.Info) error {
		keys = append(keys, info.Name)
		return nil
	}, `labels."`+labelContainer+`"==1`)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return keys, nil
}

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
