package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/tree"
)

// PrepareOptions says what a snapshot is for.
type PrepareOptions struct {
	ReadOnly   bool                   // without a writable layer unless shifted, as for a volume that is an image
	UIDs, GIDs []specs.LinuxIDMapping // shift the owners of files for a user namespace, by id-mapped mounts
}

const (
	labelRoot      = "containerd.io/gc.root" // keeps a snapshot whatever becomes of its image
	labelContainer = "minicri/container"     // marks the snapshots that Prepare made
)

// Prepare makes the snapshot key, of a container or an image volume, on top of an image.
// If the snapshot exists it returns an ErrAlreadyExists, without the image an ErrNotFound.
func (s *Store) Prepare(ctx context.Context, key, imageID string, options PrepareOptions) error {
	image, err := s.Get(imageID)
	if err != nil {
		return err
	}
	prepare, shifted := s.snapshots.Prepare, len(options.UIDs) > 0 && len(options.GIDs) > 0
	if options.ReadOnly && !shifted { // containerd's package mount binds a single layer, and does not shift what it binds read-only
		prepare = s.snapshots.View
	}
	labels := map[string]string{labelRoot: "1", labelContainer: "1"}
	if shifted {
		labels[snapshots.LabelSnapshotUIDMapping] = idMaps(options.UIDs)
		labels[snapshots.LabelSnapshotGIDMapping] = idMaps(options.GIDs)
	}
	if _, err := prepare(s.scope(ctx), key, image.ChainID, snapshots.WithLabels(labels)); err != nil {
		return fmt.Errorf("prepare snapshot %s of image %s: %w", key, image.ID, err)
	}
	return nil
}

// idMaps is the label that the snapshotter reads: /proc/PID/uid_map with colons.
func idMaps(maps []specs.LinuxIDMapping) string {
	texts := make([]string, len(maps))
	for i, m := range maps {
		texts[i] = fmt.Sprintf("%d:%d:%d", m.ContainerID, m.HostID, m.Size)
	}
	return strings.Join(texts, ",")
}

// Mount mounts a prepared snapshot at target, which it makes, with the SELinux label unless that is "".
func (s *Store) Mount(ctx context.Context, key, target, selinux string) error {
	mounts, err := s.snapshots.Mounts(s.scope(ctx), key)
	if err != nil {
		return fmt.Errorf("find the mounts of snapshot %s: %w", key, err)
	}
	if err := s.labelMounts(mounts, selinux); err != nil {
		return fmt.Errorf("label the mounts of snapshot %s: %w", key, err)
	}
	if err := os.MkdirAll(target, 0o700); err != nil {
		return fmt.Errorf("mount snapshot %s: %w", key, err)
	}
	mapped := slices.ContainsFunc(mounts, func(m mount.Mount) bool { // mount_setattr(2), MOUNT_ATTR_IDMAP
		return slices.ContainsFunc(m.Options, func(option string) bool { return strings.HasPrefix(option, "uidmap=") })
	})
	if mapped {
		// The helper process is killed with the thread that starts it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	if err := mount.All(mounts, target); err != nil {
		return fmt.Errorf("mount snapshot %s at %s: %w", key, target, err)
	}
	if mapped {
		// containerd leaves the helper's descriptor to the garbage collector, which runs
		// every 2 minutes in an idle daemon.
		runtime.GC()
	}
	return nil
}

// labelMounts gives the mounts an SELinux label, unless it is "". Only a file system can be mounted with a label of
// its own (mount(8), context), so a single read-only layer, which the snapshotter binds, becomes an overlay.
func (s *Store) labelMounts(mounts []mount.Mount, selinux string) error {
	if selinux == "" {
		return nil
	}
	for i, m := range mounts {
		if m.Type == "bind" && slices.Contains(m.Options, "rw") {
			// The snapshot of an image without layers: the container's own directory.
			if err := label.SetFileLabel(m.Source, selinux); err != nil {
				return err
			}
			continue
		}
		if m.Type == "bind" {
			// A read-only overlay needs two layers (Documentation/filesystems/overlayfs.rst);
			// mode and owner are those of the first.
			options := slices.DeleteFunc(slices.Clone(m.Options), func(option string) bool { return option == "rbind" || option == "bind" })
			lower := "lowerdir=" + m.Source + ":" + filepath.Join(s.dir, emptyDir)
			m = mount.Mount{Type: "overlay", Source: "overlay", Options: append(options, lower)}
		}
		m.Options = append(slices.Clone(m.Options), label.FormatMountLabel("", selinux))
		mounts[i] = m
	}
	return nil
}

const emptyDir = "empty" // in the store

// RemoveSnapshot removes a prepared snapshot, which is unmounted, and the files of its writable layer: under disk
// pressure the kubelet measures the disk then. What cannot be deleted is left to the collection in the background. It is
// no error if there is none.
func (s *Store) RemoveSnapshot(ctx context.Context, key string) error {
	ctx = s.scope(ctx)
	if snapshot, err := s.snapshots.Stat(ctx, key); err == nil && snapshot.Kind == snapshots.KindActive {
		_ = tree.Discard(snapshot.Labels[upperdirLabel])
	}
	err := s.snapshots.Remove(ctx, key)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove snapshot %s: %w", key, err)
	}
	s.collectSoon()
	return nil
}

// Snapshots returns the keys of all prepared snapshots.
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

// Unmount detaches all mounts at target and removes the directory. It is no error if
// nothing is mounted, or target is not there.
//
// The end of an overlay writes all of the file system below it to the disk (sync_fs of fs/overlayfs/super.c). Unmount
// does not wait for that: it keeps a detached copy of the mount (open_tree(2)), the last reference, to be closed
// after it returns. The files below may be removed meanwhile.
func (s *Store) Unmount(target string) error {
	last, err := unix.OpenTree(unix.AT_FDCWD, target, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err == nil { // else the last reference is the mount itself
		defer s.unmounted.Go(func() error { return unix.Close(last) })
	}
	if err := mount.UnmountAll(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	return nil
}

const closesAtOnce = 8 // threads that wait for a slow disk; beyond that Unmount waits

// upperdirLabel is the overlay snapshotter's label for the directory of a snapshot's files.
const upperdirLabel = "containerd.io/snapshot/overlay.upperdir"

// Usage is what something takes on the disk.
type Usage struct {
	Bytes      uint64
	Inodes     uint64
	Mountpoint string    // directory on the filesystem in question
	Time       time.Time // when it was measured
}

// ImageUsage adds up manifests, configurations, downloads and unpacked layers. The
// database has their sizes; no directory is walked.
func (s *Store) ImageUsage(ctx context.Context) (Usage, error) {
	ctx = s.scope(ctx)
	total := Usage{Mountpoint: s.dir, Time: time.Now()}
	err := s.content.Walk(ctx, func(info content.Info) error {
		total.add(info.Size, 1)
		return nil
	})
	if err != nil {
		return Usage{}, fmt.Errorf("measure images: %w", err)
	}
	err = s.snapshots.Walk(ctx, func(ctx context.Context, info snapshots.Info) error {
		if info.Kind != snapshots.KindCommitted {
			return nil
		}
		usage, err := s.snapshots.Usage(ctx, info.Name)
		total.add(usage.Size, usage.Inodes)
		if errdefs.IsNotFound(err) { // removed since it was listed
			return nil
		}
		return err
	})
	if err != nil {
		return Usage{}, fmt.Errorf("measure unpacked layers: %w", err)
	}
	return total, nil
}

// SnapshotUsage walks the writable layer of a container and the volumes that its image
// declares, which nothing else counts. A container chooses how long that takes.
func (s *Store) SnapshotUsage(ctx context.Context, key string) (Usage, error) {
	usage := Usage{Mountpoint: s.dir, Time: time.Now()}
	snapshot, err := s.snapshots.Stat(s.scope(ctx), key)
	if err != nil {
		return Usage{}, fmt.Errorf("measure snapshot %s: %w", key, err)
	}
	if snapshot.Kind == snapshots.KindActive {
		if err := usage.addTree(ctx, snapshot.Labels[upperdirLabel]); err != nil {
			return Usage{}, fmt.Errorf("measure snapshot %s: %w", key, err)
		}
	}
	if s.config.VolumesDir != "" {
		if err := usage.addTree(ctx, filepath.Join(s.config.VolumesDir, key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return Usage{}, fmt.Errorf("measure volumes of %s: %w", key, err)
		}
	}
	return usage, nil
}

func (u *Usage) addTree(ctx context.Context, path string) error {
	measured, err := tree.Measure(ctx, path)
	u.add(measured.Bytes, measured.Inodes)
	return err
}

func (u *Usage) add(bytes, inodes int64) {
	u.Bytes += uint64(max(bytes, 0))
	u.Inodes += uint64(max(inodes, 0))
}
