package oci

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

type mount = runtimeapi.Mount

// containerMounts orders what is bound, shallow before deep, so that no mount hides another.
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

// binds returns all mounts from the host. Of several in one place the last wins.
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
	depth := func(m *mount) int { return strings.Count(path.Clean(m.GetContainerPath()), "/") }
	slices.SortStableFunc(all, func(a, b *mount) int { return cmp.Compare(depth(a), depth(b)) })
	return all
}

// bind has no option for writable mounts: the runtime would remount with it, and lose nosuid, nodev and
// noexec of the source. Options hold below the source, too, if the kernel can do that (mount_setattr(2)).
func bind(c *Container, m *mount, spec *specs.Spec) (specs.Mount, error) {
	source, err := bindSource(c, m)
	if err != nil {
		return specs.Mount{}, err
	}
	propagation, err := propagate(source, m.GetPropagation(), spec)
	if err != nil {
		return specs.Mount{}, err
	}
	bound := specs.Mount{Destination: path.Clean(m.GetContainerPath()), Type: "bind", Source: source, Options: []string{"rbind", propagation}}
	switch {
	case m.GetRecursiveReadOnly():
		bound.Options = append(bound.Options, "rro")
	case m.GetReadonly() || m.GetImage() != nil:
		bound.Options = append(bound.Options, "ro")
	}
	recursive := map[bool]string{true: "r"}[c.Machine.RecursiveReadOnly && !c.Defaults.OwnSandbox]
	for _, option := range m.GetMountOptions() {
		bound.Options = append(bound.Options, recursive+option)
	}
	if m.GetImage() == nil {
		bound.UIDMappings, bound.GIDMappings = IDMappings(m.GetUidMappings()), IDMappings(m.GetGidMappings())
	}
	return bound, nil
}

// bindSource follows symbolic links on the host, as the CRI says (host_path). A volume of the image is filled later.
func bindSource(c *Container, m *mount) (string, error) {
	source := m.GetHostPath()
	switch {
	case m.GetImage() != nil:
		if source = c.ImageMounts[m.GetContainerPath()]; source == "" {
			return "", fmt.Errorf("image %s is not mounted on the host", m.GetImage().GetImage())
		}
		return source, nil
	case source == "":
		return "", errors.New("it has no source on the host")
	case c.Resolved[source] != "":
		return c.Resolved[source], nil
	case filepath.Dir(source) == c.VolumesDir:
		return source, nil
	}
	return filepath.EvalSymlinks(source)
}

// IDMappings converts those of the CRI.
func IDMappings(from []*runtimeapi.IDMapping) (to []specs.LinuxIDMapping) {
	for _, m := range from {
		to = append(to, specs.LinuxIDMapping{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength()})
	}
	return to
}

// propagate returns a mount option (mount_namespaces(7)). To receive, the source needs a peer group and the
// root must receive; to send, both must send.
func propagate(source string, mode runtimeapi.MountPropagation, spec *specs.Spec) (string, error) {
	switch mode {
	case runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		spec.Linux.RootfsPropagation = cmp.Or(spec.Linux.RootfsPropagation, "rslave")
		return "rslave", wantPeers(source, "shared:", "master:")
	case runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		spec.Linux.RootfsPropagation = "rshared"
		return "rshared", wantPeers(source, "shared:")
	default:
		return "rprivate", nil
	}
}

// wantPeers reports an error unless the mount that holds the path, which has no symbolic links, has one of the marks
// (proc_pid_mountinfo(5), optional fields). The deepest mount holds it; of equals the last, on top.
func wantPeers(source string, marks ...string) error {
	above, err := mountinfo.GetMounts(mountinfo.ParentsFilter(source))
	if err != nil {
		return fmt.Errorf("read the mount table: %w", err)
	}
	slices.SortStableFunc(above, func(a, b *mountinfo.Info) int { return cmp.Compare(len(a.Mountpoint), len(b.Mountpoint)) })
	if len(above) == 0 {
		return fmt.Errorf("%s is on no mount that can be seen from here", source)
	}
	holder := above[len(above)-1]
	for field := range strings.FieldsSeq(holder.Optional) {
		if slices.ContainsFunc(marks, func(mark string) bool { return strings.HasPrefix(field, mark) }) {
			return nil
		}
	}
	return fmt.Errorf("%s is on the mount %s, which is private and propagates nothing: run 'mount --make-rshared %s' on the node, or ask for no propagation",
		source, holder.Mountpoint, holder.Mountpoint)
}

// Volume is a container's directory for a volume of its image, filled from ContainerPath in the image.
type Volume struct{ ContainerPath, HostPath string }

// imageVolumes returns the volumes of the image that the container mounts nothing on.
func imageVolumes(c *Container) []Volume {
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
	for _, v := range imageVolumes(c) {
		mounts = append(mounts, &mount{ContainerPath: v.ContainerPath, HostPath: v.HostPath, SelinuxRelabel: true})
	}
	return mounts
}

// Source is where a mount of a container comes from.
type Source struct{ ContainerPath, HostPath string }

// relabelled returns the sources that get the SELinux label of the container's files.
func relabelled(c *Container) ([]Source, error) {
	var sources []Source
	for _, m := range binds(c) {
		if !m.GetSelinuxRelabel() || m.GetImage() != nil {
			continue
		}
		source, err := bindSource(c, m)
		if err != nil {
			return nil, fmt.Errorf("find the source of mount %s: %w", m.GetContainerPath(), err)
		}
		sources = append(sources, Source{ContainerPath: m.GetContainerPath(), HostPath: source})
	}
	return sources, nil
}

// containerHiddenPaths hides what shows or changes the node, by the lists of the base spec or the kubelet. An empty
// list is none, as in containerd; but two empty ones, with a user namespace, are procMount Unmasked.
func containerHiddenPaths(c *Container, spec *specs.Spec) error {
	defaultMasked, defaultReadonly := spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths
	spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths = nil, nil
	if c.security().GetPrivileged() {
		return nil
	}
	if defaultMasked == nil {
		defaultMasked = []string{
			"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
			"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
			"/sys/devices/virtual/powercap",
		}
	}
	if defaultReadonly == nil {
		defaultReadonly = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
	}
	masked, readonly := c.security().GetMaskedPaths(), c.security().GetReadonlyPaths()
	unmasked := c.security() != nil && len(masked)+len(readonly) == 0 && UserNamespace(c.Pod) != nil
	if len(masked) == 0 && !unmasked {
		masked = defaultMasked
	}
	if len(readonly) == 0 && !unmasked {
		readonly = defaultReadonly
	}
	spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths = masked, readonly
	if !c.Machine.CgroupV2 && slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == cgroupRoot && m.Type == "cgroup" }) {
		// On version 1 this is a tmpfs with links; the hierarchies are read-only themselves.
		spec.Linux.ReadonlyPaths = append(slices.Clone(readonly), cgroupRoot)
	}
	return nil
}

// kernelFilesystems are in every container, as in containerd, unless it mounts something there or above.
// Mounts of the base spec replace them.
func kernelFilesystems(c *Container, base []specs.Mount) []specs.Mount {
	access, cgroupAccess := "ro", "ro"
	if c.security().GetPrivileged() {
		access, cgroupAccess = "rw", "rw"
	}
	if c.Defaults.CgroupWritable && c.Machine.CgroupV2 {
		cgroupAccess = "rw"
	}
	sysfs := specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}}
	if c.bindsSysfs() {
		sysfs.Type, sysfs.Source, sysfs.Options = "bind", "/sys", []string{"rbind", "rslave", "nosuid", "noexec", "nodev", "ro"}
		if c.Machine.RecursiveReadOnly {
			sysfs.Options[5] = "rro"
		}
	}
	all := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		sysfs,
		{
			Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5", "max=1024"},
		},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{
			Destination: cgroupRoot, Type: "cgroup", Source: "cgroup",
			Options: []string{"nosuid", "noexec", "nodev", "relatime", cgroupAccess},
		},
	}
	for _, m := range base {
		// A base spec mounts these read-only, but a privileged container writes to them; and a user
		// namespace with the node's network cannot mount sysfs.
		if m.Destination == "/sys" && (c.security().GetPrivileged() || c.bindsSysfs()) || m.Destination == cgroupRoot && c.security().GetPrivileged() {
			continue
		}
		all = slices.DeleteFunc(all, func(other specs.Mount) bool { return other.Destination == m.Destination })
		all = append(all, m)
	}
	return slices.DeleteFunc(all, func(m specs.Mount) bool {
		return slices.ContainsFunc(c.Config.GetMounts(), func(own *mount) bool {
			dir := path.Clean(own.GetContainerPath())
			return m.Destination == dir || strings.HasPrefix(m.Destination, strings.TrimSuffix(dir, "/")+"/")
		})
	})
}

// bindsSysfs: only the owner of the network namespace can mount sysfs (sysfs(5)).
func (c *Container) bindsSysfs() bool { return UserNamespace(c.Pod) != nil && HostNetwork(c.Pod) }

const cgroupRoot = "/sys/fs/cgroup"

// podFiles are shared by the pod's containers. A container may mount its own; the kubelet does (/etc/hosts).
func podFiles(c *Container) []*mount {
	readonly := c.security().GetReadonlyRootfs()
	files := []*mount{
		{ContainerPath: "/etc/hosts", HostPath: c.Files.Hosts, Readonly: readonly, SelinuxRelabel: true},
		{ContainerPath: "/etc/hostname", HostPath: c.Files.Hostname, Readonly: readonly, SelinuxRelabel: true},
		{ContainerPath: "/etc/resolv.conf", HostPath: c.Files.ResolvConf, Readonly: readonly, SelinuxRelabel: true},
		{ // the node's own /dev/shm keeps its label
			ContainerPath: "/dev/shm", HostPath: c.Files.Shm, SelinuxRelabel: c.Files.Shm != "/dev/shm",
			MountOptions: []string{"nosuid", "nodev", "noexec"},
		},
	}
	return slices.DeleteFunc(files, func(f *mount) bool { return mountsAt(c, f.GetContainerPath()) })
}

func mountsAt(c *Container, place string) bool {
	return slices.ContainsFunc(c.Config.GetMounts(), func(m *mount) bool { return path.Clean(m.GetContainerPath()) == place })
}
