package container

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/oci"
)

// makeSources makes the directories that the container's mounts come from,
// where they are missing and no client makes them. It is idempotent; the
// directories stay when the container goes.
func makeSources(c *oci.Container) error {
	for _, m := range c.Config.GetMounts() {
		if m.GetImage() != nil {
			continue
		}
		if err := makeSource(m.GetHostPath(), c.Pod.GetMetadata().GetUid()); err != nil {
			return fmt.Errorf("the source of mount %s: %w", m.GetContainerPath(), err)
		}
	}
	return nil
}

// makeSource: the CRI wants an error for a host_path that is not there, but the
// kubelet leaves it to the runtime to make the directory of a hostPath volume
// without a type, so a missing one is made. Not made is what the kubelet has
// made itself, below its directory of the pod: a volume that has gone meanwhile
// must not become a directory of the node that is written to in its place. Nor
// is a directory made where only the kernel has files, or behind a symbolic
// link that leads nowhere.
func makeSource(path, podUID string) error {
	_, err := os.Stat(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, linkErr := os.Lstat(path); linkErr == nil {
		return fmt.Errorf("%s is a symbolic link to what is not there: %w", path, errdefs.ErrFailedPrecondition)
	}
	if podUID != "" && strings.Contains(filepath.Clean(path), "/pods/"+podUID+"/") || isOfTheKernel(path) {
		return fmt.Errorf("%s is not there: %w", path, errdefs.ErrFailedPrecondition)
	}
	return os.MkdirAll(path, 0o755)
}

func isOfTheKernel(path string) bool {
	path = filepath.Clean(path)
	for _, dir := range []string{"/dev/", "/proc/", "/sys/"} {
		if strings.HasPrefix(path, dir) && !strings.HasPrefix(path, "/dev/shm/") {
			return true
		}
	}
	return false
}

// makeLabels makes the SELinux labels of the container, with the level of its
// pod.
func (c *creation) makeLabels() (err error) {
	o := c.owner.options
	c.labels.Process, c.labels.Mount, err = o.Machine.NewLabels(oci.ContainerSELinux(c.config, o.Sandboxes.SELinux(c.sandbox)))
	return err
}

// relabel gives the sources of the mounts that ask for it the SELinux label of
// the container's files.
func relabel(c *oci.Container) error {
	sources, err := oci.Relabelled(c)
	if err != nil {
		return err
	}
	for _, source := range sources {
		if err := c.Machine.Relabel(source.HostPath, c.SELinux.Mount, c.SELinux.Shared()); err != nil {
			return fmt.Errorf("the source of mount %s: %w", source.ContainerPath, err)
		}
	}
	return nil
}
