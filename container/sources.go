package container

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/oci"
)

// makeSources makes the directories that the container's mounts come from,
// where they are missing. The text of the CRI wants an error for a missing
// host_path, but all runtimes make it, and the kubelet leaves hostPath volumes
// without a type to that. It is idempotent; the directories stay when the
// container goes.
func makeSources(c *oci.Container) error {
	for _, m := range c.Config.GetMounts() {
		if m.GetImage() != nil {
			continue
		}
		if err := makeSource(m.GetHostPath(), m.GetContainerPath()); err != nil {
			return err
		}
	}
	return nil
}

func makeSource(hostPath, containerPath string) error {
	_, err := os.Stat(hostPath)
	if errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(hostPath, 0o755)
	}
	if err != nil {
		return fmt.Errorf("the source of mount %s: %w", containerPath, err)
	}
	return nil
}

// relabel gives the sources of the mounts that ask for it the SELinux label of
// the container's files. A filesystem without labels is left as it is.
func relabel(c *oci.Container, spec *specs.Spec) error {
	sources, err := oci.Relabelled(c)
	if err != nil {
		return err
	}
	for _, source := range sources {
		err := label.Relabel(source.HostPath, spec.Linux.MountLabel, false)
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("relabel the source of mount %s: %w", source.ContainerPath, err)
		}
	}
	return nil
}
