package oci

import (
	"cmp"
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

// containerDevices allows the listed devices; libcontainer adds null, zero, tty and so on. A privileged
// container may use all, and has all of the node's unless its handler says otherwise.
func containerDevices(c *Container, spec *specs.Spec) error {
	if spec.Linux.Resources == nil {
		spec.Linux.Resources = &specs.LinuxResources{}
	}
	rules := append([]specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}, spec.Linux.Resources.Devices...)
	devices := c.Config.GetDevices()
	if c.security().GetPrivileged() {
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: true, Access: "rwm"})
		if !c.Defaults.PrivilegedWithoutHostDevices {
			devices = append([]*runtimeapi.Device{{HostPath: "/dev"}}, devices...)
		}
	}
	spec.Linux.Resources.Devices = rules
	for _, device := range devices {
		if err := c.addDevices(spec, device); err != nil {
			return fmt.Errorf("device %s: %w", device.GetHostPath(), err)
		}
	}
	return nil
}

// addDevices adds a device, or all below a directory, with rules unless all are allowed already.
func (c *Container) addDevices(spec *specs.Spec, device *runtimeapi.Device) error {
	found, err := findDevices(device.GetHostPath(), path.Clean(cmp.Or(device.GetContainerPath(), device.GetHostPath())))
	if err != nil {
		return err
	}
	for _, d := range found {
		if c.Defaults.DeviceOwnership && device.GetHostPath() != "/dev" {
			if id := c.security().GetRunAsUser(); id != nil {
				d.UID = new(uint32(id.GetValue()))
			}
			if id := c.security().GetRunAsGroup(); id != nil {
				d.GID = new(uint32(id.GetValue()))
			}
		}
		c.addDevice(spec, d)
		if device.GetPermissions() != "" && !c.security().GetPrivileged() {
			spec.Linux.Resources.Devices = append(spec.Linux.Resources.Devices, specs.LinuxDeviceCgroup{
				Allow: true, Type: d.Type, Major: &d.Major, Minor: &d.Minor, Access: device.GetPermissions(),
			})
		}
	}
	return nil
}

// addDevice adds a node. In a user namespace none can be made, and libcontainer binds the same path of the
// host; a device for another path is bound here.
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

// hostDevice is a device with its path in the container, and its path on the host.
type hostDevice struct {
	specs.LinuxDevice
	source string
}

// notDevices are directories in /dev that a container has for itself, or without devices.
var notDevices = []string{"pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"}

// findDevices finds a device, or those below a directory. The node may remove some meanwhile.
func findDevices(hostPath, containerPath string) ([]hostDevice, error) {
	source, err := filepath.EvalSymlinks(hostPath)
	if err != nil {
		return nil, err
	}
	var found []hostDevice
	err = filepath.WalkDir(source, func(at string, entry fs.DirEntry, err error) error {
		below := at != source
		switch {
		case err != nil:
		case entry.IsDir() && below && slices.Contains(notDevices, filepath.Base(at)):
			return fs.SkipDir
		case entry.IsDir(), below && (entry.Type()&fs.ModeDevice == 0 || at == "/dev/console"):
			return nil
		default:
			var device specs.LinuxDevice
			if device, err = readDevice(at, path.Join(containerPath, strings.TrimPrefix(at, source))); err == nil {
				found = append(found, hostDevice{device, at})
			}
		}
		if os.IsNotExist(err) && below {
			return nil
		}
		return err
	})
	return found, err
}

func readDevice(hostPath, containerPath string) (specs.LinuxDevice, error) {
	var stat unix.Stat_t
	if err := unix.Lstat(hostPath, &stat); err != nil {
		return specs.LinuxDevice{}, &fs.PathError{Op: "lstat", Path: hostPath, Err: err}
	}
	kind := map[uint32]string{unix.S_IFBLK: "b", unix.S_IFCHR: "c"}[stat.Mode&unix.S_IFMT]
	if kind == "" {
		return specs.LinuxDevice{}, fmt.Errorf("%s is neither a device nor a directory", hostPath)
	}
	return specs.LinuxDevice{
		Path: containerPath, Type: kind,
		Major: int64(unix.Major(stat.Rdev)), Minor: int64(unix.Minor(stat.Rdev)),
		FileMode: new(os.FileMode(stat.Mode &^ unix.S_IFMT)), UID: &stat.Uid, GID: &stat.Gid,
	}, nil
}

// containerCDI adds what vendors of the devices want. The kubelet still asks by annotations as well.
func containerCDI(c *Container, spec *specs.Spec) error {
	_, annotated, err := cdi.ParseAnnotations(c.Config.GetAnnotations())
	if err != nil {
		return fmt.Errorf("CDI annotations: %w", err)
	}
	var asked []string
	for _, device := range c.Config.GetCDIDevices() {
		asked = append(asked, device.GetName())
	}
	devices := Once(append(asked, annotated...))
	switch {
	case len(devices) == 0:
		return nil
	case c.CDI == nil:
		return fmt.Errorf("CDI devices %q: this runtime has no CDI directories", devices)
	}
	if _, err := c.CDI.InjectDevices(spec, devices...); err != nil {
		all := []error{fmt.Errorf("CDI devices %q: %w", devices, err)}
		for file, errs := range c.CDI.GetErrors() {
			all = append(all, fmt.Errorf("%s: %w", file, errors.Join(errs...)))
		}
		return errors.Join(all...)
	}
	if UserNamespace(c.Pod) == nil {
		return nil
	}
	// InjectDevices sets the path on the host in no field of the spec, so the edits are looked at again.
	for _, name := range devices {
		device := c.CDI.GetDevice(name)
		for _, node := range slices.Concat(device.GetSpec().ContainerEdits.DeviceNodes, device.ContainerEdits.DeviceNodes) {
			injected := func(d specs.LinuxDevice) bool { return d.Path == node.Path } // and not bound yet
			if node.HostPath != "" && node.HostPath != node.Path && slices.ContainsFunc(spec.Linux.Devices, injected) {
				c.addDevice(spec, hostDevice{specs.LinuxDevice{Path: node.Path}, node.HostPath})
			}
		}
	}
	return nil
}

// Once drops repeated names: the hooks of a device must not run twice.
func Once(names []string) (once []string) {
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	return once
}
