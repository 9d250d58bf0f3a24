package oci

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

type mount = runtimeapi.Mount

// containerMounts: the kernel's filesystems, then all that is bound from the
// host, shallow before deep, so that no mount hides another.
func containerMounts(c *Container, spec *specs.Spec) error {
	spec.Mounts = kernelFilesystems(c, spec.Mounts)
	for _, m := range binds(c) {
		bound, err := bind(c, m, spec)
		if err != nil {
			return fmt.Errorf("mount %s: %w", m.GetContainerPath(), err)
		}
		spec.Mounts = append(spec.Mounts, bound)
	}
	return nil
}

// binds are all mounts from the host. Of several in one place the last wins:
// the container's own over the image's volumes and the pod's files.
func binds(c *Container) []*mount {
	var all []*mount
	at := make(map[string]int)
	for _, m := range slices.Concat(podFiles(c), volumeMounts(c), c.Config.GetMounts()) {
		place := path.Clean(m.GetContainerPath())
		if i, taken := at[place]; taken {
			all[i] = m
			continue
		}
		at[place] = len(all)
		all = append(all, m)
	}
	slices.SortStableFunc(all, func(a, b *mount) int { return cmp.Compare(depth(a), depth(b)) })
	return all
}

func depth(m *mount) int { return strings.Count(path.Clean(m.GetContainerPath()), "/") }

func bind(c *Container, m *mount, spec *specs.Spec) (specs.Mount, error) {
	source, err := bindSource(c, m)
	if err != nil {
		return specs.Mount{}, err
	}
	propagation, err := propagate(source, m.GetPropagation(), spec)
	if err != nil {
		return specs.Mount{}, err
	}
	return specs.Mount{
		Destination: path.Clean(m.GetContainerPath()),
		Type:        "bind",
		Source:      source,
		Options:     slices.Concat([]string{"rbind", propagation}, bindAccess(m), c.bindOptions(m)),
		UIDMappings: linuxIDMappings(bindMappings(m.GetImage(), m.GetUidMappings())),
		GIDMappings: linuxIDMappings(bindMappings(m.GetImage(), m.GetGidMappings())),
	}, nil
}

// bindMappings: an image is mounted with the pod's mappings already.
func bindMappings(image *runtimeapi.ImageSpec, mappings []*runtimeapi.IDMapping) []*runtimeapi.IDMapping {
	if image != nil {
		return nil
	}
	return mappings
}

// bindSource follows symbolic links on the host, as the CRI says (host_path).
func bindSource(c *Container, m *mount) (string, error) {
	source := c.ImageMounts[m.GetContainerPath()]
	switch {
	case m.GetImage() == nil && m.GetHostPath() == "":
		return "", errors.New("it has no source on the host")
	case m.GetImage() == nil:
		return filepath.EvalSymlinks(m.GetHostPath())
	case source == "":
		return "", fmt.Errorf("image %s is not mounted on the host", m.GetImage().GetImage())
	default:
		return source, nil
	}
}

// bindAccess: images are always mounted read-only. What may be written to needs
// no option: with one, the runtime mounts it anew with these options alone, and
// nosuid, nodev and noexec of the source would be lost.
func bindAccess(m *mount) []string {
	switch {
	case m.GetRecursiveReadOnly():
		return []string{"rro"}
	case m.GetReadonly() || m.GetImage() != nil:
		return []string{"ro"}
	default:
		return nil
	}
}

// bindOptions hold for mounts below the source, too, where the kernel can do
// that (mount_setattr(2)): a volume may have some.
func (c *Container) bindOptions(m *mount) []string {
	if !c.Machine.RecursiveReadOnly || c.Defaults.OwnSandbox {
		return m.GetMountOptions()
	}
	var options []string
	for _, option := range m.GetMountOptions() {
		options = append(options, "r"+option)
	}
	return options
}

func linuxIDMappings(from []*runtimeapi.IDMapping) []specs.LinuxIDMapping {
	var to []specs.LinuxIDMapping
	for _, m := range from {
		to = append(to, specs.LinuxIDMapping{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength()})
	}
	return to
}
