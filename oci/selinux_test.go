package oci

import (
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const podLabel = "system_u:system_r:container_t:s0:c10,c20"

// cri: SELinuxOption.level SELinuxOption.role SELinuxOption.type SELinuxOption.user
// cri: LinuxSandboxSecurityContext.selinux_options
func TestSELinuxOptions(t *testing.T) {
	pod := SELinux{Process: podLabel}
	for _, test := range []struct {
		name       string
		options    *runtimeapi.SELinuxOption
		privileged bool
		want       []string
	}{
		{"the level of the pod", nil, false, []string{"level:s0:c10,c20"}},
		{"a level of its own", &runtimeapi.SELinuxOption{Level: "s0:c1,c2"}, false, []string{"level:s0:c1,c2"}},
		{"all of its own", &runtimeapi.SELinuxOption{User: "u", Role: "r", Type: "t", Level: "s0"}, false, []string{"user:u", "role:r", "type:t", "level:s0"}},
		{"privileged", nil, true, []string{"type:spc_t", "level:s0:c10,c20"}},
		{"privileged with a type of its own", &runtimeapi.SELinuxOption{Type: "t"}, true, []string{"type:t", "level:s0:c10,c20"}},
	} {
		config := &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			SelinuxOptions: test.options, Privileged: test.privileged,
		}}}
		harness.Same(t, test.name, ContainerSELinux(config, pod), test.want)
		sandbox := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			SelinuxOptions: test.options, Privileged: test.privileged,
		}}}
		want := slices.DeleteFunc(slices.Clone(test.want), func(option string) bool { return option == "level:s0:c10,c20" })
		harness.Same(t, test.name+": of the pod", SandboxSELinux(sandbox), want)
	}
}

func TestSELinuxLevel(t *testing.T) {
	for label, want := range map[string]struct {
		level  string
		shared bool
	}{
		"":                                   {"", true},
		"system_u:system_r:container_t":      {"", true},
		"system_u:system_r:container_t:s0":   {"s0", true},
		podLabel:                             {"s0:c10,c20", false},
		"system_u:system_r:spc_t:s0:c10,c20": {"s0:c10,c20", true},
	} {
		got := SELinux{Process: label}
		harness.Want(t, got.Level() == want.level && got.Shared() == want.shared, "%q: level %q, shared %v, want %+v", label, got.Level(), got.Shared(), want)
	}
}

// The labels that were made for pause and for a container are in their specs.
func TestSELinuxOfSpecs(t *testing.T) {
	labels := SELinux{Process: podLabel, Mount: "system_u:object_r:container_file_t:s0:c10,c20"}
	pause, err := ForSandbox(&Sandbox{SELinux: labels})
	must(t, err)
	container, err := (&Container{SELinux: labels}).newSpec()
	must(t, err)
	for _, spec := range []*specs.Spec{pause, container} {
		harness.Want(t, spec.Process.SelinuxLabel == labels.Process && spec.Linux.MountLabel == labels.Mount,
			"process %q, mounts %q", spec.Process.SelinuxLabel, spec.Linux.MountLabel)
	}
}
