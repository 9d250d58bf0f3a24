package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	copying "github.com/containerd/continuity/fs"
)

// FillVolumes copies what the image has at the places of its volumes into
// them, with owners, modes and all. The rootfs is mounted, and MakeSources has
// made the volumes. A place that the image does not have is an empty volume.
func FillVolumes(c *Container) error {
	for _, v := range ImageVolumes(c) {
		if err := fillVolume(c.Rootfs, v); err != nil {
			return fmt.Errorf("fill the image's volume %s: %w", v.ContainerPath, err)
		}
	}
	return nil
}

func fillVolume(rootfs string, v Volume) error {
	source, err := InRootfs(rootfs, v.ContainerPath)
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
	return copying.CopyDir(v.HostPath, source, copying.WithAllowXAttrErrors())
}
