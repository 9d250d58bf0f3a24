package oci

import (
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// Containers as the kubelet asks for them, all rules together.
func TestForContainer(t *testing.T) {
	goldenContainers(t, "container", func(s *specs.Spec) any {
		if s.Linux.Seccomp != nil { // see TestContainerSeccomp
			s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: s.Linux.Seccomp.DefaultAction}
		}
		return s
	}, ForContainer)
}

// cri: CDIDevice.name Capability.add_ambient_capabilities ContainerConfig.CDI_devices
// cri: LinuxContainerResources.cpuset_mems LinuxContainerResources.unified
// cri: LinuxContainerSecurityContext.apparmor LinuxContainerSecurityContext.apparmor_profile
// cri: Mount.mount_options Mount.recursive_read_only
func TestContainerRules(t *testing.T) {
	for _, test := range []struct {
		golden string
		rule   containerRule
		part   func(*specs.Spec) any
	}{
		{"container_process", containerProcess, func(s *specs.Spec) any { return s.Process }},
		{"container_env", containerEnv, func(s *specs.Spec) any { return s.Process.Env }},
		{"container_user", containerUser, func(s *specs.Spec) any { return s.Process.User }},
		{"container_capabilities", containerCapabilities, func(s *specs.Spec) any { return s.Process.Capabilities }},
		{"container_namespaces", containerNamespaces, func(s *specs.Spec) any { return s.Linux.Namespaces }},
		{"container_mounts", containerMounts, func(s *specs.Spec) any { return s.Mounts }},
		{"container_hidden", containerHiddenPaths, hiddenPart},
		{"container_resources", containerResources, func(s *specs.Spec) any { return s.Linux.Resources }},
		{"container_devices", containerDevices, devicesPart},
		{"container_cdi", containerCDI, func(s *specs.Spec) any { return s }},
		{"container_apparmor", containerAppArmor, func(s *specs.Spec) any { return s.Process.ApparmorProfile }},
	} {
		t.Run(test.golden, func(t *testing.T) { goldenContainer(t, test.golden, test.rule, test.part) })
	}
}

// A runtime that makes a sandbox for each container is not told that there is one of the
// pod, and gets options of mounts alone that every runtime knows; any other is, and does.
func TestSandboxPerContainer(t *testing.T) {
	const kind = "io.kubernetes.cri.container-type"
	for own, want := range map[bool]struct{ kind, option string }{true: {"", "nosuid"}, false: {"container", "rnosuid"}} {
		c := &Container{
			SandboxID: "sandbox", Config: &runtimeapi.ContainerConfig{}, Pod: &runtimeapi.PodSandboxConfig{},
			Machine: machine.Machine{RecursiveReadOnly: true}, Defaults: Defaults{OwnSandbox: own},
		}
		annotations := containerAnnotations(c)
		if annotations[kind] != want.kind || annotations["io.kubernetes.cri.sandbox-id"] != "sandbox" {
			t.Errorf("own sandbox %t: annotations %v", own, annotations)
		}
		if options := c.bindOptions(&mount{MountOptions: []string{"nosuid"}}); !slices.Equal(options, []string{want.option}) {
			t.Errorf("own sandbox %t: options %v", own, options)
		}
	}
}

func hiddenPart(s *specs.Spec) any {
	return map[string][]string{"masked": s.Linux.MaskedPaths, "readonly": s.Linux.ReadonlyPaths}
}

func devicesPart(s *specs.Spec) any {
	return map[string]any{"nodes": s.Linux.Devices, "rules": s.Linux.Resources.Devices, "mounts": s.Mounts}
}
