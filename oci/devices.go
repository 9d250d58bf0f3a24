package oci

import (
	"errors"
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
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// containerDevices: nothing may be used but what is listed, and the usual
// devices (null, zero, tty, ...), which libcontainer adds by itself. A
// privileged container may use everything, and has what the node has, unless its
// handler says otherwise; what it lists is there besides, in the place that it
// names.
func containerDevices(c *Container, spec *specs.Spec) error {
	if spec.Linux.Resources == nil {
		spec.Linux.Resources = &specs.LinuxResources{}
	}
	none := specs.LinuxDeviceCgroup{Allow: false, Access: "rwm"}
	spec.Linux.Resources.Devices = slices.Insert(spec.Linux.Resources.Devices, 0, none)
	if c.security().GetPrivileged() {
		allowDevices(spec, specs.LinuxDeviceCgroup{Allow: true, Access: "rwm"})
	}
	if c.security().GetPrivileged() && !c.Defaults.PrivilegedWithoutHostDevices {
		if err := c.addDevices(spec, &runtimeapi.Device{HostPath: "/dev", ContainerPath: "/dev"}); err != nil {
			return fmt.Errorf("the devices of the node: %w", err)
		}
	}
	for _, device := range c.Config.GetDevices() {
		if err := c.addDevices(spec, device); err != nil {
			return fmt.Errorf("device %s: %w", device.GetHostPath(), err)
		}
	}
	return nil
}

// addDevices adds a device, or all below a directory. A rule is needed for
// each, unless all are allowed: then no permissions are given.
func (c *Container) addDevices(spec *specs.Spec, device *runtimeapi.Device) error {
	found, err := findDevices(device.GetHostPath(), devicePath(device))
	if err != nil {
		return err
	}
	for _, d := range found {
		if c.Defaults.DeviceOwnership && device.GetHostPath() != "/dev" {
			c.ownDevice(&d)
		}
		c.addDevice(spec, d)
		if device.GetPermissions() != "" && !c.security().GetPrivileged() {
			allowDevices(spec, specs.LinuxDeviceCgroup{
				Allow: true, Type: d.Type, Major: &d.Major, Minor: &d.Minor, Access: device.GetPermissions(),
			})
		}
	}
	return nil
}

// ownDevice gives a device to the user that the container is to run as.
func (c *Container) ownDevice(d *hostDevice) {
	if id := c.security().GetRunAsUser(); id != nil {
		uid := uint32(id.GetValue())
		d.UID = &uid
	}
	if id := c.security().GetRunAsGroup(); id != nil {
		gid := uint32(id.GetValue())
		d.GID = &gid
	}
}

// addDevice: in a user namespace no node can be made, and libcontainer binds
// the one with the same path on the host. One that is to be in another place
// is bound here.
func (c *Container) addDevice(spec *specs.Spec, d hostDevice) {
	spec.Linux.Devices = slices.DeleteFunc(spec.Linux.Devices, func(other specs.LinuxDevice) bool { return other.Path == d.Path })
	if UserNamespace(c.Pod) == nil || d.source == d.Path {
		spec.Linux.Devices = append(spec.Linux.Devices, d.LinuxDevice)
		return
	}
	spec.Mounts = append(spec.Mounts, specs.Mount{
		Destination: d.Path, Type: "bind", Source: d.source, Options: []string{"bind", "rprivate", "nosuid", "noexec"},
	})
}

// hostDevice is a device of the host in its place in the container.
type hostDevice struct {
	specs.LinuxDevice
	source string
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
func findDevices(hostPath, containerPath string) ([]hostDevice, error) {
	source, err := filepath.EvalSymlinks(hostPath)
	if err != nil {
		return nil, err
	}
	var found []hostDevice
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
		found = append(found, hostDevice{device, at})
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

// containerCDI adds what the vendors of the asked devices say that they need:
// nodes, mounts, variables, hooks. A device that no file describes is an error.
func containerCDI(c *Container, spec *specs.Spec) error {
	devices, err := cdiDevices(c)
	if err != nil || len(devices) == 0 {
		return err
	}
	if c.CDI == nil {
		return fmt.Errorf("CDI devices %q: this runtime has no CDI directories", devices)
	}
	if _, err := c.CDI.InjectDevices(spec, devices...); err != nil {
		return errors.Join(fmt.Errorf("CDI devices %q: %w", devices, err), c.cdiErrors())
	}
	return nil
}

// cdiDevices are those of the CRI's field and those of annotations, the older
// way, which the kubelet sends as well.
func cdiDevices(c *Container) ([]string, error) {
	_, annotated, err := cdi.ParseAnnotations(c.Config.GetAnnotations())
	if err != nil {
		return nil, fmt.Errorf("CDI annotations: %w", err)
	}
	var devices []string
	for _, device := range c.Config.GetCDIDevices() {
		devices = append(devices, device.GetName())
	}
	return Once(append(devices, annotated...)), nil
}

// Once has each name at its first place only: the hooks of a device must not run twice.
func Once(names []string) (once []string) {
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	return once
}

// cdiErrors lists the files that could not be read: the device may be in one.
func (c *Container) cdiErrors() error {
	var all []error
	for file, errs := range c.CDI.GetErrors() {
		all = append(all, fmt.Errorf("%s: %w", file, errors.Join(errs...)))
	}
	return errors.Join(all...)
}
