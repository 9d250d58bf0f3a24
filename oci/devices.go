package oci

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// containerDevices: nothing may be used but what is listed, and the usual
// devices (null, zero, tty, ...), which libcontainer adds by itself.
func containerDevices(c *Container, spec *specs.Spec) error {
	if spec.Linux.Resources == nil {
		spec.Linux.Resources = &specs.LinuxResources{}
	}
	allowDevices(spec, specs.LinuxDeviceCgroup{Allow: false, Access: "rwm"})
	if c.security().GetPrivileged() {
		allowDevices(spec, specs.LinuxDeviceCgroup{Allow: true, Access: "rwm"})
		return addDevices(spec, &runtimeapi.Device{HostPath: "/dev", ContainerPath: "/dev"})
	}
	for _, device := range c.Config.GetDevices() {
		if err := addDevices(spec, device); err != nil {
			return fmt.Errorf("device %s: %w", device.GetHostPath(), err)
		}
	}
	return nil
}

// addDevices adds a device, or all below a directory. A rule is needed for
// each, unless all are allowed: then no permissions are given.
func addDevices(spec *specs.Spec, device *runtimeapi.Device) error {
	nodes, err := findDevices(device.GetHostPath(), devicePath(device))
	if err != nil {
		return err
	}
	for i := range nodes {
		node := &nodes[i]
		spec.Linux.Devices = slices.DeleteFunc(spec.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Path == node.Path })
		spec.Linux.Devices = append(spec.Linux.Devices, *node)
		if device.GetPermissions() != "" {
			allowDevices(spec, specs.LinuxDeviceCgroup{
				Allow: true, Type: node.Type, Major: &node.Major, Minor: &node.Minor, Access: device.GetPermissions(),
			})
		}
	}
	return nil
}

// devicePath: without a path of its own a device is where it is on the host.
func devicePath(device *runtimeapi.Device) string {
	if device.GetContainerPath() == "" {
		return path.Clean(device.GetHostPath())
	}
	return path.Clean(device.GetContainerPath())
}

func allowDevices(spec *specs.Spec, rule specs.LinuxDeviceCgroup) {
	spec.Linux.Resources.Devices = append(spec.Linux.Resources.Devices, rule)
}

// findDevices finds what is at a path of the host, symbolic links followed: a
// device, or a directory with devices, which keep their places in it.
func findDevices(hostPath, containerPath string) ([]specs.LinuxDevice, error) {
	source, err := filepath.EvalSymlinks(hostPath)
	if err != nil {
		return nil, err
	}
	var found []specs.LinuxDevice
	err = filepath.WalkDir(source, func(at string, entry fs.DirEntry, err error) error {
		if err != nil {
			return ignoreVanished(at, source, err)
		}
		if entry.IsDir() {
			return skipDir(at, source)
		}
		if at != source && (entry.Type()&fs.ModeDevice == 0 || at == "/dev/console") {
			return nil
		}
		device, err := readDevice(at, path.Join(containerPath, strings.TrimPrefix(at, source)))
		if err != nil {
			return ignoreVanished(at, source, err)
		}
		found = append(found, device)
		return nil
	})
	return found, err
}

// ignoreVanished: the node makes and removes devices while they are listed.
func ignoreVanished(at, source string, err error) error {
	if os.IsNotExist(err) && at != source {
		return nil
	}
	return err
}

// skipDir: these are filesystems of their own, or no devices of the node; a
// container has its own console and terminals.
func skipDir(at, source string) error {
	if at != source && slices.Contains([]string{"pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"}, filepath.Base(at)) {
		return fs.SkipDir
	}
	return nil
}

func readDevice(hostPath, containerPath string) (specs.LinuxDevice, error) {
	var stat unix.Stat_t
	if err := unix.Lstat(hostPath, &stat); err != nil {
		return specs.LinuxDevice{}, &fs.PathError{Op: "lstat", Path: hostPath, Err: err}
	}
	kind := ""
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		kind = "b"
	case unix.S_IFCHR:
		kind = "c"
	default:
		return specs.LinuxDevice{}, fmt.Errorf("%s is neither a device nor a directory", hostPath)
	}
	mode := os.FileMode(stat.Mode &^ unix.S_IFMT)
	return specs.LinuxDevice{
		Path: containerPath, Type: kind,
		Major: int64(unix.Major(stat.Rdev)), Minor: int64(unix.Minor(stat.Rdev)),
		FileMode: &mode, UID: &stat.Uid, GID: &stat.Gid,
	}, nil
}
