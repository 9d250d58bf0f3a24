package validate

import (
	"fmt"
	"path"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/minicri/minicri/internal/machine"
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
	c.image()
	c.process()
	c.logPath()
	c.stopSignal()
	c.mounts()
	c.devices()
	c.cdiDevices()
	c.inForce("config.linux.resources.", config.GetLinux().GetResources(), m)
	c.privileged()
	c.capabilities()
	c.namespaces()
	c.user()
	c.hiddenPaths()
	c.profiles()
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

func (c *container) image() {
	if c.config.GetImage().GetImage() == "" {
		c.bad("config.image", "is missing")
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

func (c *container) stopSignal() {
	if _, known := runtimeapi.Signal_name[int32(c.config.GetStopSignal())]; !known {
		c.bad("config.stop_signal", "%d is unknown", c.config.GetStopSignal())
	}
}

func (c *container) devices() {
	for i, device := range c.config.GetDevices() {
		field := fmt.Sprintf("config.devices[%d].", i)
		c.absolute(field+"host_path", device.GetHostPath())
		if device.GetContainerPath() != "" {
			c.absolute(field+"container_path", device.GetContainerPath())
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
