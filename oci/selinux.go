package oci

import (
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux/label"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sandboxSELinux labels pause as the pod asks; a machine without SELinux
// ignores labels, as every runtime does.
func sandboxSELinux(s *Sandbox, spec *specs.Spec) error {
	if !s.Machine.SELinux || s.security().GetPrivileged() {
		return nil
	}
	process, mount, err := label.InitLabels(selinuxOptions(s.security().GetSelinuxOptions()))
	if err != nil {
		return err
	}
	spec.Process.SelinuxLabel = process
	spec.Linux.MountLabel = mount
	return nil
}

// containerSELinux labels the container as it asks, with the level of its pod
// unless it asks for one: so the containers of a pod can share files, and
// those of other pods cannot read them.
func containerSELinux(c *Container, spec *specs.Spec) error {
	if !c.Machine.SELinux || c.security().GetPrivileged() {
		return nil
	}
	options := selinuxOptions(c.security().GetSelinuxOptions())
	if level := levelOf(c.SandboxLabel); level != "" && c.security().GetSelinuxOptions().GetLevel() == "" {
		options = append(options, "level:"+level)
	}
	process, mount, err := label.InitLabels(options)
	if err != nil {
		return err
	}
	spec.Process.SelinuxLabel = process
	spec.Linux.MountLabel = mount
	return nil
}

// levelOf is the last part of user:role:type:level; a level has colons, too.
func levelOf(label string) string {
	parts := strings.SplitN(label, ":", 4)
	if len(parts) < 4 {
		return ""
	}
	return parts[3]
}

func selinuxOptions(o *runtimeapi.SELinuxOption) []string {
	var options []string
	add := func(name, value string) {
		if value != "" {
			options = append(options, name+":"+value)
		}
	}
	add("user", o.GetUser())
	add("role", o.GetRole())
	add("type", o.GetType())
	add("level", o.GetLevel())
	return options
}
