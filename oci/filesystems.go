package oci

import (
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// kernelFilesystems are mounted in every container, as in Docker and
// containerd; where the container mounts something itself, also above one of
// them, that one is not mounted: a mount of the node's /dev means all of it.
// Mounts of the base spec take the place of these.
func kernelFilesystems(c *Container, base []specs.Mount) []specs.Mount {
	access, cgroupAccess := "ro", "ro"
	if c.security().GetPrivileged() {
		access, cgroupAccess = "rw", "rw"
	}
	if c.Defaults.CgroupWritable && c.Machine.CgroupV2 {
		cgroupAccess = "rw"
	}
	all := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		c.sysfs(access),
		{
			Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"},
		},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{
			Destination: cgroupRoot, Type: "cgroup", Source: "cgroup",
			Options: []string{"nosuid", "noexec", "nodev", "relatime", cgroupAccess},
		},
	}
	for _, m := range base {
		if c.keepsOwn(m, all) {
			continue
		}
		all = slices.DeleteFunc(all, func(other specs.Mount) bool { return other.Destination == m.Destination })
		all = append(all, m)
	}
	return slices.DeleteFunc(all, func(m specs.Mount) bool {
		return slices.ContainsFunc(c.Config.GetMounts(), func(own *mount) bool { return isAtOrBelow(m.Destination, own.GetContainerPath()) })
	})
}

// keepsOwn: a base spec that was made for most containers mounts these read-only,
// where a privileged one writes to them, and in a way that a user namespace with the
// network of the node cannot.
func (c *Container) keepsOwn(m specs.Mount, own []specs.Mount) bool {
	if m.Destination != "/sys" && m.Destination != cgroupRoot {
		return false
	}
	return c.security().GetPrivileged() || slices.ContainsFunc(own, func(other specs.Mount) bool { return other.Destination == m.Destination && other.Type == "bind" })
}

// sysfs can only be mounted in a user namespace that owns the network namespace
// (sysfs(5)): with the network of the node it is the node's, read-only.
func (c *Container) sysfs(access string) specs.Mount {
	if UserNamespace(c.Pod) == nil || !HostNetwork(c.Pod) {
		return specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}}
	}
	readonly := "ro"
	if c.Machine.RecursiveReadOnly {
		readonly = "rro"
	}
	return specs.Mount{Destination: "/sys", Type: "bind", Source: "/sys", Options: []string{"rbind", "rslave", "nosuid", "noexec", "nodev", readonly}}
}

const cgroupRoot = "/sys/fs/cgroup"

func isAtOrBelow(name, dir string) bool {
	dir = path.Clean(dir)
	return name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/")
}

// podFiles are what the containers of a pod share, unless the container mounts
// its own in the same place: the kubelet does so with /etc/hosts.
func podFiles(c *Container) []*mount {
	readonly := c.security().GetReadonlyRootfs()
	files := []*mount{
		{ContainerPath: "/etc/hosts", HostPath: c.Files.Hosts, Readonly: readonly, SelinuxRelabel: true},
		{ContainerPath: "/etc/hostname", HostPath: c.Files.Hostname, Readonly: readonly, SelinuxRelabel: true},
		{ContainerPath: "/etc/resolv.conf", HostPath: c.Files.ResolvConf, Readonly: readonly, SelinuxRelabel: true},
		{
			ContainerPath: "/dev/shm", HostPath: c.Files.Shm, SelinuxRelabel: c.Files.Shm != nodeShm,
			MountOptions: []string{"nosuid", "nodev", "noexec"},
		},
	}
	mountsDev := mountsAt(c, "/dev")
	return slices.DeleteFunc(files, func(f *mount) bool {
		return mountsAt(c, f.GetContainerPath()) || mountsDev && strings.HasPrefix(f.GetContainerPath(), "/dev/")
	})
}

// nodeShm is shared with the processes of the node and keeps its label.
const nodeShm = "/dev/shm"

func mountsAt(c *Container, place string) bool {
	return slices.ContainsFunc(c.Config.GetMounts(), func(m *mount) bool { return path.Clean(m.GetContainerPath()) == place })
}
