package oci

import (
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// privilegedType is the type of privileged containers: SELinux confines them no
// more than processes of the node, and does so by its policy, not by leaving
// them in the domain of the daemon.
const privilegedType = "spc_t"

// SELinux are the labels of a process and of its files, "" where the machine has
// no SELinux.
type SELinux struct{ Process, Mount string }

// Level is what keeps the pod apart from others, as in s0:c1,c2.
func (s SELinux) Level() string {
	// user:role:type:level; a level has colons, too.
	parts := strings.SplitN(s.Process, ":", 4)
	if len(parts) < 4 {
		return ""
	}
	return parts[3]
}

// Shared reports whether files that get the label are for several pods: the
// level has no categories, or the process has access to those of all pods.
func (s SELinux) Shared() bool {
	return !strings.Contains(s.Level(), ":") || strings.Contains(s.Process, ":"+privilegedType+":")
}

// SandboxSELinux are the options of the label of a pod's pause process.
func SandboxSELinux(config *runtimeapi.PodSandboxConfig) []string {
	security := config.GetLinux().GetSecurityContext()
	return selinuxOptions(security.GetSelinuxOptions(), security.GetPrivileged(), "")
}

// ContainerSELinux are the options of the label of a container: with the level
// of its pod, unless it asks for one. So the containers of a pod can share
// files, and those of other pods cannot read them.
func ContainerSELinux(config *runtimeapi.ContainerConfig, pod SELinux) []string {
	security := config.GetLinux().GetSecurityContext()
	return selinuxOptions(security.GetSelinuxOptions(), security.GetPrivileged(), pod.Level())
}

func selinuxOptions(o *runtimeapi.SELinuxOption, privileged bool, level string) []string {
	if o.GetLevel() != "" {
		level = o.GetLevel()
	}
	kind := o.GetType()
	if kind == "" && privileged {
		kind = privilegedType
	}
	var options []string
	add := func(name, value string) {
		if value != "" {
			options = append(options, name+":"+value)
		}
	}
	add("user", o.GetUser())
	add("role", o.GetRole())
	add("type", kind)
	add("level", level)
	return options
}

func sandboxSELinux(s *Sandbox, spec *specs.Spec) error {
	spec.Process.SelinuxLabel, spec.Linux.MountLabel = s.SELinux.Process, s.SELinux.Mount
	return nil
}

func containerSELinux(c *Container, spec *specs.Spec) error {
	spec.Process.SelinuxLabel, spec.Linux.MountLabel = c.SELinux.Process, c.SELinux.Mount
	return nil
}
