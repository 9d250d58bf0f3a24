package validate

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/oci"
)

type container struct {
	problems
	config   *runtimeapi.ContainerConfig
	security *runtimeapi.LinuxContainerSecurityContext
	pod      *runtimeapi.PodSandboxConfig
	machine  machine.Machine
}

// Container reports what is wrong with a container in a pod. What depends on the image, or on files of the
// node that come and go, shows when the spec is made.
func Container(config *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig, m machine.Machine) error {
	c := &container{config: config, security: config.GetLinux().GetSecurityContext(), pod: pod, machine: m}
	if config == nil {
		c.bad("config", "is missing")
		return c.err()
	}
	c.form("config.", config.ProtoReflect())
	c.metadata()
	if config.GetImage().GetImage() == "" {
		c.bad("config.image", "is missing")
	}
	for i, env := range config.GetEnvs() {
		if env.GetKey() == "" || strings.Contains(env.GetKey(), "=") {
			c.bad(fmt.Sprintf("config.envs[%d].key", i), "%q is not a name of a variable", env.GetKey())
		}
	}
	c.logPath()
	for i, m := range config.GetMounts() {
		c.mount(fmt.Sprintf("config.mounts[%d].", i), m)
	}
	c.devices()
	c.inForce("config.linux.resources.", config.GetLinux().GetResources(), m)
	c.namespaces()
	c.user()
	for list, paths := range map[string][]string{"masked_paths": c.security.GetMaskedPaths(), "readonly_paths": c.security.GetReadonlyPaths()} {
		for i, name := range paths {
			c.absolute(fmt.Sprintf("%s%s[%d]", securityContext, list, i), name)
		}
	}
	switch {
	case !c.security.GetPrivileged():
		c.capabilities()
		c.profiles(oci.SeccompOf(c.security), oci.ContainerAppArmor(c.security), m)
	case !pod.GetLinux().GetSecurityContext().GetPrivileged(): // which says beforehand that such a container will come
		c.bad(securityContext+"privileged", "is set, but the pod is not privileged")
	}
	return c.err()
}

// metadata checks the name, which goes into log lines and the container's unique name.
func (c *container) metadata() {
	name := c.config.GetMetadata().GetName()
	switch {
	case c.config.GetMetadata() == nil:
		c.bad("config.metadata", "is missing")
	case name == "":
		c.bad("config.metadata.name", "is empty")
	case len(name) > longestName:
		c.bad("config.metadata.name", "has %d characters, more than %d", len(name), longestName)
	case strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f || r == '/' }) || strings.Contains(name, ".."):
		c.bad("config.metadata.name", "%q has a space, a control character, '/' or '..'", name)
	}
}

// logPath must stay in the pod's log_directory.
func (c *container) logPath() {
	name := c.config.GetLogPath()
	switch {
	case name == "":
	case path.IsAbs(name):
		c.bad("config.log_path", "%q is absolute, it has to be relative to the pod's log_directory", name)
	case leadsUp(name):
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
	for i, device := range c.config.GetCDIDevices() {
		if _, _, _, err := parser.ParseQualifiedName(device.GetName()); err != nil {
			c.bad(fmt.Sprintf("config.CDI_devices[%d].name", i), "%w", err)
		}
	}
	if _, _, err := cdi.ParseAnnotations(c.config.GetAnnotations()); err != nil {
		c.bad("config.annotations", "%w", err)
	}
}

// mountOptions only take away. Options that give, or change other fields, are refused.
var mountOptions = []string{"noexec", "nodev", "nosuid", "nosymfollow", "noatime", "nodiratime"}

func (c *container) mount(field string, m *runtimeapi.Mount) {
	c.destination(field+"container_path", m.GetContainerPath())
	switch {
	case m.GetImage() == nil:
		// If the pod has an image volume, the kubelet (1.36, makeMounts) sends image_sub_path for the other
		// volumes, too; host_path has it already.
		c.absolute(field+"host_path", m.GetHostPath())
	case m.GetImage().GetImage() == "":
		c.bad(field+"image", "has no name")
	case m.GetHostPath() != "":
		c.bad(field+"host_path", "is set, and so is an image")
	case !m.GetReadonly():
		c.bad(field+"readonly", "is false, but an image can only be mounted read-only")
	}
	// The node needs the labels of some directories.
	if m.GetSelinuxRelabel() && c.machine.SELinux && m.GetImage() == nil {
		if err := machine.CheckRelabel(m.GetHostPath()); err != nil {
			c.bad(field+"selinux_relabel", "%w", err)
		}
	}
	recursive := field + "recursive_read_only"
	switch {
	case !m.GetRecursiveReadOnly():
	case !m.GetReadonly():
		c.bad(recursive, "is set without readonly")
	case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
		c.bad(recursive, "is set with the propagation %v, only PRIVATE is possible", m.GetPropagation())
	case !c.machine.RecursiveReadOnly:
		c.bad(recursive, "needs Linux 5.12")
	}
	for i, option := range m.GetMountOptions() {
		if !slices.Contains(mountOptions, option) {
			c.bad(fmt.Sprintf("%smount_options[%d]", field, i), "%q is not one of %q", option, mountOptions)
		}
	}
	if (len(m.GetUidMappings()) == 0) != (len(m.GetGidMappings()) == 0) {
		c.bad(field+"uidMappings", "uidMappings and gidMappings go together")
	}
	c.idRanges(field+"uidMappings", m.GetUidMappings())
	c.idRanges(field+"gidMappings", m.GetGidMappings())
}

func (p *problems) destination(field, at string) {
	p.place(field, at)
	if path.Clean(at) == "/" {
		p.bad(field, "is the root of the container")
	}
}

// Mount reports what is wrong with a mount that no request names; source "" is none.
func Mount(destination, source string) error {
	p := &problems{}
	p.text("destination", destination)
	p.destination("destination", destination)
	if source != "" {
		p.text("source", source)
		p.place("source", source)
	}
	return p.err()
}

// capabilities: the daemon can give only what it has, and "all" means that. Unknown names have no effect.
func (c *container) capabilities() {
	asked := c.security.GetCapabilities()
	drop := oci.RequestedCapabilities(asked.GetDropCapabilities())
	for list, names := range map[string][]string{"add": asked.GetAddCapabilities(), "add_ambient": asked.GetAddAmbientCapabilities()} {
		for i, name := range oci.RequestedCapabilities(names) {
			if machine.IsCapability(name) && !slices.Contains(drop, name) && !slices.Contains(c.machine.Capabilities, name) {
				field := fmt.Sprintf("%scapabilities.%s_capabilities[%d]", securityContext, list, i)
				c.bad(field, "the runtime itself does not have %s on this machine", name)
			}
		}
	}
}

// namespaces: a container has its pod's user namespace, and need not ask for it.
func (c *container) namespaces() {
	o, own := c.security.GetNamespaceOptions(), oci.UserNamespace(c.pod)
	const ofPod, ofContainer, ofNode, ofTarget = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE, runtimeapi.NamespaceMode_TARGET
	c.mode(namespaceField+"network", o.GetNetwork(), ofPod, ofNode)
	c.mode(namespaceField+"ipc", o.GetIpc(), ofPod, ofNode)
	c.mode(namespaceField+"pid", o.GetPid(), ofPod, ofContainer, ofNode, ofTarget)
	if (o.GetPid() == ofTarget) != (o.GetTargetId() != "") {
		c.bad(namespaceField+"target_id", "%q with the pid mode %v: TARGET and a target_id go together", o.GetTargetId(), o.GetPid())
	}
	if o.GetPid() == ofNode && own != nil {
		c.bad(namespaceField+"pid", "is NODE, which a pod with a user namespace of its own cannot have")
	}
	switch asked := o.GetUsernsOptions(); {
	case asked == nil:
	case asked.GetMode() != ofPod && asked.GetMode() != ofNode:
		c.bad(namespaceField+"userns_options.mode", "%v is not one of POD and NODE", asked.GetMode())
	case (asked.GetMode() != ofNode || own != nil) && !proto.Equal(asked, own):
		c.bad(namespaceField+"userns_options", "is not that of the pod")
	}
}

// user refuses a number as a name: it would be taken even if no one has it.
func (c *container) user() {
	id, name, group := c.security.GetRunAsUser(), c.security.GetRunAsUsername(), c.security.GetRunAsGroup()
	c.id(securityContext+"run_as_user", id.GetValue(), lastPosixID)
	c.id(securityContext+"run_as_group", group.GetValue(), lastPosixID)
	c.ids(securityContext+"supplemental_groups", c.security.GetSupplementalGroups(), lastPosixID)
	if id != nil && name != "" {
		c.bad(securityContext+"run_as_username", "is set, and so is run_as_user")
	}
	if strings.ContainsAny(name, ":\n") {
		c.bad(securityContext+"run_as_username", "%q is not a name of a user", name)
	}
	if _, err := strconv.ParseInt(name, 10, 64); err == nil {
		c.bad(securityContext+"run_as_username", "%q is a number: give it as run_as_user", name)
	}
	if group != nil && id == nil && name == "" {
		c.bad(securityContext+"run_as_group", "is set without run_as_user or run_as_username")
	}
}

// maxListed bounds all pods, and all containers, in a list without labels and annotations. The kubelet
// reads at most 16 MiB, and takes the node for dead otherwise. Statistics of pods name containers, too: each
// kind gets less than half.
const maxListed = 7 << 20

// Listed refuses a pod or container with which the list of its kind would exceed one message.
func Listed(kind string, count, used, more int) error {
	if used+more <= maxListed {
		return nil
	}
	return fmt.Errorf("config.metadata, config.image: this %s takes %d bytes in the list of all, the %d that are there take %d, and more than %d together do not fit into one message: remove some, or give it shorter names: %w",
		kind, more, count, used, maxListed, errdefs.ErrResourceExhausted)
}
