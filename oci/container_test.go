package oci

import (
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/test/harness"
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
		rule   func(*Container, *specs.Spec) error
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
		{"container_apparmor", containerProfiles, func(s *specs.Spec) any { return s.Process.ApparmorProfile }},
	} {
		t.Run(test.golden, func(t *testing.T) { goldenRule(t, test.golden, test.rule, test.part) })
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
		spec, err := c.newSpec()
		must(t, err)
		annotations := spec.Annotations
		harness.Want(t, annotations[kind] == want.kind && annotations["io.kubernetes.cri.sandbox-id"] == "sandbox",
			"own sandbox %t: annotations %v", own, annotations)
		bound, err := bind(c, &mount{HostPath: "/", MountOptions: []string{"nosuid"}}, spec)
		harness.Want(t, err == nil && slices.Contains(bound.Options, want.option), "own sandbox %t: options %v, %v", own, bound.Options, err)
	}
}

func hiddenPart(s *specs.Spec) any {
	return map[string][]string{"masked": s.Linux.MaskedPaths, "readonly": s.Linux.ReadonlyPaths}
}

func devicesPart(s *specs.Spec) any {
	return map[string]any{"nodes": s.Linux.Devices, "rules": s.Linux.Resources.Devices, "mounts": s.Mounts}
}

func TestForExec(t *testing.T) {
	spec := &specs.Spec{Process: &specs.Process{
		Args: []string{"/server"}, Cwd: "/app", Env: make([]string, 1, 8), User: specs.User{UID: 7, AdditionalGids: []uint32{8}},
		Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}, NoNewPrivileges: true,
	}}
	spec.Process.Env[0] = "A=1"
	want := *spec.Process
	want.Args = []string{"ls"}
	harness.Same(t, "an exec", *ForExec(spec, []string{"ls"}, false), want)
	want.Terminal, want.Env = true, []string{"A=1", "TERM=xterm"}
	harness.Same(t, "an exec with a terminal", *ForExec(spec, []string{"ls"}, true), want)
	harness.Want(t, len(spec.Process.Env) == 1 && spec.Process.Env[:2][1] == "" && spec.Process.Args[0] == "/server",
		"the container's own process has changed: %+v", spec.Process)
	spec.Process.Env = []string{"TERM=linux"}
	harness.Same(t, "the environment", ForExec(spec, []string{"ls"}, true).Env, []string{"TERM=linux"})
}

func TestCgroupsPath(t *testing.T) {
	for _, test := range []struct {
		parent  string
		systemd bool
		path    string
		dir     string // below each hierarchy
	}{
		{"/kubepods/burstable/pod1", false, "/kubepods/burstable/pod1/m-1f-abc", "/kubepods/burstable/pod1/m-1f-abc"},
		{"kubepods", false, "/kubepods/m-1f-abc", "/kubepods/m-1f-abc"},
		{"", false, "/m-1f-abc", "/m-1f-abc"},
		{"/a//b/./", false, "/a/b/m-1f-abc", "/a/b/m-1f-abc"},
		{"kubepods-pod1.slice", true, "kubepods-pod1.slice:m-1f:abc", "/kubepods.slice/kubepods-pod1.slice/m-1f-abc.scope"},
		// The kubelet sends the whole path of the slice.
		{"/kubepods.slice/kubepods-pod1.slice", true, "kubepods-pod1.slice:m-1f:abc", "/kubepods.slice/kubepods-pod1.slice/m-1f-abc.scope"},
		{"/kubepods.slice/", true, "kubepods.slice:m-1f:abc", "/kubepods.slice/m-1f-abc.scope"},
		{"-.slice", true, "-.slice:m-1f:abc", "/m-1f-abc.scope"},
	} {
		path := CgroupsPath(test.parent, "m-1f-", "abc", test.systemd)
		dir := cgroup.Path(path)
		harness.Want(t, path == test.path && dir == test.dir, "%q, systemd %v: %q and %q, want %q and %q", test.parent, test.systemd, path, dir, test.path, test.dir)
	}
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }
