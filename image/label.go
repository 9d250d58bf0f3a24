package image

import (
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/opencontainers/selinux/go-selinux/label"
)

// labelMounts gives what is mounted the SELinux label, unless it is "". Only a file
// system can be mounted with a label of its own (mount(8), context): a single layer,
// which the snapshotter binds, keeps the label that it has on the disk, and no
// container may read it.
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
			m = overlayOf(m, filepath.Join(s.dir, emptyDir))
		}
		m.Options = append(slices.Clone(m.Options), label.FormatMountLabel("", selinux))
		mounts[i] = m
	}
	return nil
}

// emptyDir is an empty directory of the store, a layer below.
const emptyDir = "empty"

// overlayOf is the overlay that shows what a read-only bind does. Without a layer to
// write to it has to have two (Documentation/filesystems/overlayfs.rst); the
// directory's own mode and owner are those of the first.
func overlayOf(bind mount.Mount, empty string) mount.Mount {
	options := slices.DeleteFunc(slices.Clone(bind.Options), func(option string) bool { return option == "rbind" || option == "bind" })
	return mount.Mount{Type: "overlay", Source: "overlay", Options: append(options, "lowerdir="+bind.Source+":"+empty)}
}
