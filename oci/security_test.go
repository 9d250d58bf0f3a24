package oci

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
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

func allows(profile *specs.LinuxSeccomp, name string) bool {
	return slices.ContainsFunc(profile.Syscalls, func(rule specs.LinuxSyscall) bool {
		return rule.Action == specs.ActAllow && len(rule.Args) == 0 && slices.Contains(rule.Names, name)
	})
}

// The default profile of a container allows what its capabilities are for.
func TestContainerSeccomp(t *testing.T) {
	profile := func(kind runtimeapi.SecurityProfile_ProfileType) *runtimeapi.LinuxContainerSecurityContext {
		return &runtimeapi.LinuxContainerSecurityContext{Seccomp: &runtimeapi.SecurityProfile{ProfileType: kind}}
	}
	strong := profile(runtimeapi.SecurityProfile_RuntimeDefault)
	strong.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	privileged := profile(runtimeapi.SecurityProfile_RuntimeDefault)
	privileged.Privileged = true
	for _, test := range []struct {
		name               string
		security           *runtimeapi.LinuxContainerSecurityContext
		confined, mayMount bool
	}{
		{"none", nil, false, false},
		{"default", profile(runtimeapi.SecurityProfile_RuntimeDefault), true, false},
		//lint:ignore SA1019 the older form is still sent
		{"default, the older form", &runtimeapi.LinuxContainerSecurityContext{SeccompProfilePath: "runtime/default"}, true, false},
		{"unconfined", profile(runtimeapi.SecurityProfile_Unconfined), false, false},
		{"default with CAP_SYS_ADMIN", strong, true, true},
		{"default, privileged", privileged, false, false},
	} {
		got := seccompOf(t, test.security).Linux.Seccomp
		if (got != nil) != test.confined {
			t.Errorf("%s: confined %v, want %v", test.name, got != nil, test.confined)
		} else if test.confined && (!allows(got, "execve") || allows(got, "mount") != test.mayMount) {
			t.Errorf("%s: mount allowed: %v, want %v", test.name, allows(got, "mount"), test.mayMount)
		}
	}
}

func seccompOf(t *testing.T, security *runtimeapi.LinuxContainerSecurityContext) *specs.Spec {
	c := &Container{
		Config:  &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: security}},
		Machine: machine.Machine{Capabilities: append(DefaultCapabilities(), "CAP_SYS_ADMIN")},
	}
	spec := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
	for _, rule := range []func(*Container, *specs.Spec) error{containerCapabilities, containerProfiles} {
		must(t, rule(c, spec))
	}
	return spec
}

// cri: LinuxContainerSecurityContext.seccomp_profile_path
func TestContainerSeccompFromFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "profile.json")
	must(t, os.WriteFile(file, []byte(`{"defaultAction":"SCMP_ACT_LOG"}`), 0o600))
	for _, security := range []*runtimeapi.LinuxContainerSecurityContext{
		{Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: file}},
		{SeccompProfilePath: "localhost/" + file},
	} {
		got := seccompOf(t, security).Linux.Seccomp
		harness.Want(t, got != nil && got.DefaultAction == specs.ActLog, "%v gives %v", security, got)
	}
}
