package oci

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

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
		if got := seccompOf(t, security).Linux.Seccomp; got == nil || got.DefaultAction != specs.ActLog {
			t.Errorf("%v gives %v", security, got)
		}
	}
}
