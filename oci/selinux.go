package oci

import (
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
