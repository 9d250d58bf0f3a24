package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"
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

// MakeSources makes the directories that the container's mounts come from,
// where they are missing. The text of the CRI wants an error for a missing
// host_path, but all runtimes make it, and the kubelet leaves hostPath volumes
// without a type to that. It is idempotent; the directories stay when the
// container goes, but for those of volumes, which are the caller's.
func MakeSources(c *Container) error {
	for _, m := range slices.Concat(volumeMounts(c), c.Config.GetMounts()) {
		if m.GetImage() != nil {
			continue
		}
		_, err := os.Stat(m.GetHostPath())
		if errors.Is(err, fs.ErrNotExist) {
			err = os.MkdirAll(m.GetHostPath(), 0o755)
		}
		if err != nil {
			return fmt.Errorf("the source of mount %s: %w", m.GetContainerPath(), err)
		}
	}
	return nil
}

// Relabel gives the sources of the mounts that ask for it the SELinux label of
// the container's files. A filesystem without labels is left as it is.
func Relabel(c *Container, spec *specs.Spec) error {
	for _, m := range binds(c) {
		if !m.GetSelinuxRelabel() || m.GetImage() != nil {
			continue
		}
		source, err := bindSource(c, m)
		if err == nil {
			err = label.Relabel(source, spec.Linux.MountLabel, false)
		}
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("relabel the source of mount %s: %w", m.GetContainerPath(), err)
		}
	}
	return nil
}
