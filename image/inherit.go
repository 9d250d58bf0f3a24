package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/containerd/containerd/v2/core/snapshots"
	continuity "github.com/containerd/continuity/fs"
	"github.com/containerd/continuity/sysx"
	"golang.org/x/sys/unix"
)

// upperdirLabel is where the overlay snapshotter says which directory holds a
// snapshot's files.
const upperdirLabel = "containerd.io/snapshot/overlay.upperdir"

// inheriting gives directories that a layer does not list the owner, mode,
// times and extended attributes that they have in the layers below. Layers are
// unpacked without their parents, side by side, so this is done when the layer
// is committed: by then all below it are.
//
// A directory that is made because of a file in it would otherwise be 0755
// root:root and hide the attributes below: /tmp would lose its sticky bit, and
// private directories would open up.
type inheriting struct {
	snapshots.Snapshotter
	syncs bool

	mu      sync.Mutex
	implied map[string][]string // by upper directory: paths in it, parents first
}

func newInheriting(snapshotter snapshots.Snapshotter, syncs bool) *inheriting {
	return &inheriting{Snapshotter: snapshotter, syncs: syncs, implied: map[string][]string{}}
}

// note keeps which directories below upper the layer did not list.
func (i *inheriting) note(upper string, implied []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.implied[upper] = implied
}

func (i *inheriting) take(upper string) []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	implied := i.implied[upper]
	delete(i.implied, upper)
	return implied
}

// Commit makes an unpacked layer a snapshot on top of the one that opts name.
func (i *inheriting) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	var committed snapshots.Info
	for _, opt := range opts {
		if err := opt(&committed); err != nil {
			return err
		}
	}
	if err := i.inherit(ctx, key, committed.Parent); err != nil {
		return fmt.Errorf("set the attributes of directories that layer %s does not list: %w", name, err)
	}
	return i.Snapshotter.Commit(ctx, name, key, opts...)
}

func (i *inheriting) inherit(ctx context.Context, key, parent string) error {
	active, err := i.Stat(ctx, key)
	if err != nil {
		return err
	}
	upper := active.Labels[upperdirLabel]
	implied := i.take(upper)
	if parent == "" || len(implied) == 0 {
		return nil
	}
	below, err := i.upperdirs(ctx, parent)
	if err != nil {
		return err
	}
	for _, path := range implied {
		if err := inheritAttributes(filepath.Join(upper, path), path, below); err != nil {
			return err
		}
	}
	if i.syncs {
		return syncFilesystem(upper)
	}
	return nil
}

// upperdirs returns the directories of a snapshot and of those below it.
func (i *inheriting) upperdirs(ctx context.Context, name string) (dirs []string, err error) {
	for name != "" {
		info, err := i.Stat(ctx, name)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, info.Labels[upperdirLabel])
		name = info.Parent
	}
	return dirs, nil
}

// inheritAttributes copies the attributes of path in the topmost layer below
// that has it. A layer where something else is in its place, or where a
// directory above it is opaque, ends the search: what is below is hidden.
func inheritAttributes(target, path string, below []string) error {
	for _, layer := range below {
		source, info, err := find(layer, path)
		switch {
		case err == nil && !info.IsDir():
			return nil
		case err == nil:
			return copyAttributes(target, source, info)
		case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
			return nil
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		if hidesBelow(layer, source) {
			return nil
		}
	}
	return nil
}

// find looks for path in a layer, and follows links within it. Where a file or a
// whiteout is above path the error is ENOTDIR, for links in a circle ELOOP.
func find(layer, path string) (source string, info fs.FileInfo, err error) {
	source, err = continuity.RootPath(layer, path)
	if err != nil {
		if _, ok := errors.AsType[*fs.PathError](err); !ok { // "too many links"
			err = fmt.Errorf("%w: %w", err, syscall.ELOOP)
		}
		return "", nil, err
	}
	info, err = os.Lstat(source)
	return source, info, err
}

// hidesBelow reports whether a layer that does not have path hides it in the
// layers under it.
func hidesBelow(layer, path string) bool {
	for dir := filepath.Dir(path); len(dir) > len(layer); dir = filepath.Dir(dir) {
		if value, err := sysx.LGetxattr(dir, "trusted.overlay.opaque"); err == nil && string(value) == "y" {
			return true
		}
	}
	return false
}

// copyAttributes leaves out trusted.*: those of overlayfs are about one layer.
func copyAttributes(target, source string, info fs.FileInfo) error {
	stat := info.Sys().(*syscall.Stat_t)
	if err := os.Lchown(target, int(stat.Uid), int(stat.Gid)); err != nil {
		return err
	}
	if err := os.Chmod(target, info.Mode()); err != nil {
		return err
	}
	names, err := sysx.LListxattr(source)
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("list xattrs of %s: %w", source, err)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, "trusted.") })
	for _, name := range names {
		value, err := sysx.LGetxattr(source, name)
		if err == nil {
			err = sysx.LSetxattr(target, name, value, 0)
		}
		if err != nil {
			return fmt.Errorf("copy xattr %s of %s: %w", name, source, err)
		}
	}
	times := []unix.Timespec{unix.NsecToTimespec(stat.Atim.Nano()), unix.NsecToTimespec(stat.Mtim.Nano())}
	return unix.UtimesNanoAt(unix.AT_FDCWD, target, times, unix.AT_SYMLINK_NOFOLLOW)
}
