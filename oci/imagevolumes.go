package oci

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
)

// Volume is a volume that an image declares: a directory of the container's
// own at HostPath, to be filled with what the image has at ContainerPath.
type Volume struct{ ContainerPath, HostPath string }

// ImageVolumes are the volumes of the container's image, without those that
// the container mounts something on.
func ImageVolumes(c *Container) []Volume {
	var volumes []Volume
	for i, declared := range slices.Sorted(slices.Values(c.Image.Volumes)) {
		place := path.Join("/", declared)
		if place != "/" && !mountsAt(c, place) {
			volumes = append(volumes, Volume{ContainerPath: place, HostPath: filepath.Join(c.VolumesDir, strconv.Itoa(i))})
		}
	}
	return volumes
}

func volumeMounts(c *Container) []*mount {
	var mounts []*mount
	for _, v := range ImageVolumes(c) {
		mounts = append(mounts, &mount{ContainerPath: v.ContainerPath, HostPath: v.HostPath, SelinuxRelabel: true})
	}
	return mounts
}

// Source is where a mount of a container comes from.
type Source struct{ ContainerPath, HostPath string }

// Relabelled are the sources that are to get the SELinux label of the
// container's files.
func Relabelled(c *Container) ([]Source, error) {
	var sources []Source
	for _, m := range binds(c) {
		if !m.GetSelinuxRelabel() || m.GetImage() != nil {
			continue
		}
		source, err := bindSource(c, m)
		if err != nil {
			return nil, fmt.Errorf("the source of mount %s: %w", m.GetContainerPath(), err)
		}
		sources = append(sources, Source{ContainerPath: m.GetContainerPath(), HostPath: source})
	}
	return sources, nil
}
