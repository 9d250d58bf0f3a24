package container

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	copying "github.com/containerd/continuity/fs"

	"github.com/minicri/minicri/oci"
)

// fillVolumes makes the volumes and copies what the image has in their places
// into them, with owners, modes and all. The rootfs is mounted. A place that the
// image does not have is an empty volume of the container's user.
func fillVolumes(rootfs string, volumes []oci.Volume, user owner) error {
	for _, v := range volumes {
		if err := fillVolume(rootfs, v, user); err != nil {
			return fmt.Errorf("fill the image's volume %s: %w", v.ContainerPath, err)
		}
	}
	return nil
}

func fillVolume(rootfs string, v oci.Volume, user owner) error {
	if err := os.MkdirAll(v.HostPath, 0o755); err != nil {
		return err
	}
	if err := os.Chown(v.HostPath, user.uid, user.gid); err != nil {
		return err
	}
	source, err := inRootfs(rootfs, v.ContainerPath)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	info, err := os.Lstat(source)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return errors.New("it is not a directory in the image")
	}
	// A filesystem without extended attributes holds all the rest.
	if err := copying.CopyDir(v.HostPath, source, copying.WithAllowXAttrErrors()); err != nil {
		return err
	}
	return removeDevices(v.HostPath)
}

// removeDevices removes device nodes: in a volume they are on a filesystem of the
// node. A container gets its devices from its config.
func removeDevices(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type()&fs.ModeDevice != 0 {
			err = os.Remove(path)
		}
		return err
	})
}
