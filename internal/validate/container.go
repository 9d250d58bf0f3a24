package validate

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/oci"
)

// Container reports what is wrong with a request for a container in a pod. What
// depends on the image, or on files of the node that may come and go, shows
// when the spec is made.
func Container(config *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig, m machine.Machine) error {
	c := &container{config: config, pod: pod, machine: m}
	if config == nil {
		c.bad("config", "is missing")
		return c.err()
	}
	c.metadata()
	if config.GetImage().GetImage() == "" {
		c.bad("config.image", "is missing")
	}
	c.process()
	c.logPath()
	known(&c.problems, "config.stop_signal", runtimeapi.Signal_name, config.GetStopSignal())
	c.mounts()
	c.devices()
	c.cdiDevices()
	c.inForce("config.linux.resources.", config.GetLinux().GetResources(), m)
	c.privileged()
	c.capabilities()
	c.namespaces()
	c.user()
	c.hiddenPaths()
	if !c.security().GetPrivileged() { // whose profiles are not applied
		c.profiles(oci.SeccompOf(c.security()), oci.ContainerAppArmor(c.security()), m)
	}
	c.texts("labels", config.GetLabels())
	c.texts("annotations", config.GetAnnotations())
	c.notWindows("config.windows", config.GetWindows() != nil)
	return c.err()
}

type container struct {
	problems
	config  *runtimeapi.ContainerConfig
	pod     *runtimeapi.PodSandboxConfig
	machine machine.Machine
}

func (c *container) security() *runtimeapi.LinuxContainerSecurityContext {
	return c.config.GetLinux().GetSecurityContext()
}

// metadata: the name goes into log lines and the container's unique name.
func (c *container) metadata() {
	if c.config.GetMetadata() == nil {
		c.bad("config.metadata", "is missing")
		return
	}
	name := c.config.GetMetadata().GetName()
	switch {
	case name == "":
		c.bad("config.metadata.name", "is empty")
	case len(name) > longestName:
		c.bad("config.metadata.name", "has %d characters, more than %d", len(name), longestName)
	case strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f || r == '/' }) || strings.Contains(name, ".."):
		c.bad("config.metadata.name", "%q has a space, a control character, '/' or '..'", name)
	}
}

// process: what goes into the argument and environment lists of execve(2).
func (c *container) process() {
	for field, words := range map[string][]string{"command": c.config.GetCommand(), "args": c.config.GetArgs()} {
		for i, word := range words {
			c.text(fmt.Sprintf("config.%s[%d]", field, i), word)
		}
	}
	c.text("config.working_dir", c.config.GetWorkingDir())
	for i, env := range c.config.GetEnvs() {
		field := fmt.Sprintf("config.envs[%d].", i)
		c.text(field+"key", env.GetKey())
		c.text(field+"value", string(env.GetValue()))
		if env.GetKey() == "" || strings.Contains(env.GetKey(), "=") {
			c.bad(field+"key", "%q is not a name of a variable", env.GetKey())
		}
	}
}

// logPath is relative to the pod's log_directory, and stays in it.
func (c *container) logPath() {
	name := c.config.GetLogPath()
	switch {
	case name == "":
	case strings.ContainsRune(name, 0):
		c.bad("config.log_path", "has a NUL character")
	case path.IsAbs(name):
		c.bad("config.log_path", "%q is absolute, it has to be relative to the pod's log_directory", name)
	case slices.Contains(strings.Split(name, "/"), ".."):
		c.bad("config.log_path", "%q has an element '..'", name)
	case path.Clean(name) == ".":
		c.bad("config.log_path", "%q is not a file", name)
	}
}

func (c *container) devices() {
	for i, device := range c.config.GetDevices() {
		field := fmt.Sprintf("config.devices[%d].", i)
		c.absolute(field+"host_path", device.GetHostPath())
		if device.GetContainerPath() != "" {
			c.place(field+"container_path", device.GetContainerPath())
		}
		permissions := device.GetPermissions()
		if permissions == "" || strings.Trim(permissions, "rwm") != "" {
			c.bad(field+"permissions", "%q is not made of r, w and m", permissions)
		}
	}
}

func (c *container) cdiDevices() {
	for i, device := range c.config.GetCDIDevices() {
		if _, _, _, err := parser.ParseQualifiedName(device.GetName()); err != nil {
			c.bad(fmt.Sprintf("config.CDI_devices[%d].name", i), "%w", err)
		}
	}
	if _, _, err := cdi.ParseAnnotations(c.config.GetAnnotations()); err != nil {
		c.bad("config.annotations", "%w", err)
	}
}

func (c *container) mounts() {
	for i, m := range c.config.GetMounts() {
		field := fmt.Sprintf("config.mounts[%d].", i)
		c.place(field+"container_path", m.GetContainerPath())
		c.notRoot(field+"container_path", m.GetContainerPath())
		c.mountSource(field, m)
		c.relabel(field+"selinux_relabel", m)
		known(&c.problems, field+"propagation", runtimeapi.MountPropagation_name, m.GetPropagation())
		c.recursiveReadOnly(field+"recursive_read_only", m)
		c.mountOptions(field+"mount_options", m.GetMountOptions())
		c.mountMappings(field, m)
	}
}

// Mount reports what is wrong with the places of a mount that does not come from
// a request; source is empty for one that has none on the node.
func Mount(destination, source string) error {
	p := &problems{}
	p.place("destination", destination)
	p.notRoot("destination", destination)
	if source != "" {
		p.place("source", source)
	}
	return p.err()
}

func (p *problems) notRoot(field, at string) {
	if path.Clean(at) == "/" {
		p.bad(field, "is the root of the container")
	}
}

// mountSource is a path or an image.
func (c *container) mountSource(field string, m *runtimeapi.Mount) {
	switch {
	case m.GetImage() == nil:
		// In a pod that has an image volume, the kubelet (1.36, makeMounts) sends
		// image_sub_path for the other volumes' sub paths as well. Those are in
		// host_path already.
		c.absolute(field+"host_path", m.GetHostPath())
	case m.GetImage().GetImage() == "":
		c.bad(field+"image", "has no name")
	case m.GetHostPath() != "":
		c.bad(field+"host_path", "is set, and so is an image")
	case !m.GetReadonly():
		c.bad(field+"readonly", "is false, but an image can only be mounted read-only")
	}
}

// relabel: the labels of some directories are the node's.
func (c *container) relabel(field string, m *runtimeapi.Mount) {
	if !m.GetSelinuxRelabel() || !c.machine.SELinux || m.GetImage() != nil {
		return
	}
	if err := machine.CheckRelabel(m.GetHostPath()); err != nil {
		c.bad(field, "%w", err)
	}
}

func (c *container) recursiveReadOnly(field string, m *runtimeapi.Mount) {
	switch {
	case !m.GetRecursiveReadOnly():
	case !m.GetReadonly():
		c.bad(field, "is set without readonly")
	case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
		c.bad(field, "is set with the propagation %v, only PRIVATE is possible", m.GetPropagation())
	case !c.machine.RecursiveReadOnly:
		c.bad(field, "needs Linux 5.12")
	}
}

// mountOptions can only take away: those that would give, or change what other
// fields say, are refused.
func (c *container) mountOptions(field string, options []string) {
	possible := []string{"noexec", "nodev", "nosuid", "nosymfollow", "noatime", "nodiratime"}
	for i, option := range options {
		if !slices.Contains(possible, option) {
			c.bad(fmt.Sprintf("%s[%d]", field, i), "%q is not one of %q", option, possible)
		}
	}
}

// mountMappings map the ids of the mounted files (mount_setattr(2)).
func (c *container) mountMappings(field string, m *runtimeapi.Mount) {
	if (len(m.GetUidMappings()) == 0) != (len(m.GetGidMappings()) == 0) {
		c.bad(field+"uidMappings", "uidMappings and gidMappings go together")
	}
	c.idRanges(field+"uidMappings", m.GetUidMappings())
	c.idRanges(field+"gidMappings", m.GetGidMappings())
}

// mostListed bounds what all pods together, and all containers together, may take
// in a list without their labels and annotations, which a list leaves out where it
// would be too long. The kubelet reads a list as one message of at most 16 MiB, and
// a list that is longer is none: it takes the node for dead. The statistics of pods
// name those of containers too, so that each kind has less than half of it.
const mostListed = 7 << 20

// Listed refuses a pod or a container, as kind says, that would make their list too
// long. used are the bytes of all that are there, more those of this one.
func Listed(kind string, count, used, more int) error {
	if used+more <= mostListed {
		return nil
	}
	return fmt.Errorf("config.metadata, config.image: this %s takes %d bytes in the list of all, the %d that are there take %d, and more than %d together do not fit into one message: remove some, or give it shorter names: %w",
		kind, more, count, used, mostListed, errdefs.ErrResourceExhausted)
}
