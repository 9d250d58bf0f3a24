package validate

import (
	"math"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

const (
	resourcesField = "config.linux.resources."
	nsField        = namespaceField
)

type (
	config = runtimeapi.ContainerConfig
	pair   = runtimeapi.KeyValue
)

func containerSecurity(c *config) *runtimeapi.LinuxContainerSecurityContext {
	return c.Linux.SecurityContext
}
func limits(c *config) *runtimeapi.LinuxContainerResources { return c.Linux.Resources }
func nsOptions(c *config) *runtimeapi.NamespaceOption {
	return c.Linux.SecurityContext.NamespaceOptions
}
func number(n int64) *runtimeapi.Int64Value { return &runtimeapi.Int64Value{Value: n} }

func localhostProfile(ref string) *runtimeapi.SecurityProfile {
	return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: ref}
}

func profileOf(kind runtimeapi.SecurityProfile_ProfileType) *runtimeapi.SecurityProfile {
	return &runtimeapi.SecurityProfile{ProfileType: kind}
}

var unmapped = []*runtimeapi.IDMapping{{HostId: 65536, Length: 65536}}

// goodContainer asks for all that a container can ask for at once.
func goodContainer() *config {
	return &config{
		Metadata: &runtimeapi.ContainerMetadata{Name: "nginx", Attempt: 3}, Image: &runtimeapi.ImageSpec{Image: "sha256:5e"},
		Command: []string{"/bin/sh", ""}, Args: []string{"-c", "a\nb"}, WorkingDir: "app",
		Envs: []*pair{{Key: "A", Value: []byte("ä\x01\n=")}}, LogPath: "nginx/0.log", StopSignal: runtimeapi.Signal_SIGNAL_SIGRTMAX,
		Mounts: []*runtimeapi.Mount{
			{ContainerPath: "/a/..b", HostPath: "/b", Readonly: true, RecursiveReadOnly: true, MountOptions: []string{"noexec", "nodev", "nosuid"}},
			{ContainerPath: "/c", Image: &runtimeapi.ImageSpec{Image: "x"}, ImageSubPath: "d", Readonly: true},
			{ContainerPath: "/d/../../e", HostPath: "/e", ImageSubPath: "as the kubelet sends it", Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL, UidMappings: unmapped, GidMappings: unmapped},
		},
		Devices:     []*runtimeapi.Device{{HostPath: "/dev/null", Permissions: "mrw"}, {HostPath: "/dev/x", ContainerPath: "/dev/y", Permissions: "r"}},
		CDIDevices:  []*runtimeapi.CDIDevice{{Name: "vendor.com/net=eth0"}},
		Annotations: map[string]string{"cdi.k8s.io/a": "vendor.com/net=eth1", "any": ""},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{
				CpuQuota: -1, CpuPeriod: 100000, CpuShares: 2, MemoryLimitInBytes: 1 << 20, MemorySwapLimitInBytes: 1 << 20, OomScoreAdj: -1000,
				CpusetCpus: "0-3,7", CpusetMems: "0", HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}},
				Unified: map[string]string{"memory.oom.group": "1", "cgroup.max.depth": "5"},
			},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				Capabilities: &runtimeapi.Capability{
					AddCapabilities: []string{"ALL", "CAP_CHOWN"}, DropCapabilities: []string{"sys_admin"}, AddAmbientCapabilities: []string{"KILL"},
				},
				RunAsUser: number(0), RunAsGroup: number(math.MaxInt32), SupplementalGroups: []int64{5},
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: "beef"},
				MaskedPaths:      []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"},
				Seccomp: profileOf(runtimeapi.SecurityProfile_RuntimeDefault), Apparmor: profileOf(runtimeapi.SecurityProfile_Unconfined),
			},
		},
	}
}

func goodMachine() machine.Machine {
	return machine.Machine{CgroupV2: true, Controllers: []string{"cpu", "memory"}, RecursiveReadOnly: true, CPUs: 8, MemoryNodes: 1, HugepageSizes: []string{"1GB", "2MB"}, Capabilities: oci.DefaultCapabilities()}
}

func TestContainerAccepts(t *testing.T) {
	minimal := &config{Metadata: &runtimeapi.ContainerMetadata{Name: "a"}, Image: &runtimeapi.ImageSpec{Image: "b"}}
	harness.Check(t, Container(minimal, nil, machine.Machine{}))
	harness.Check(t, Container(goodContainer(), &runtimeapi.PodSandboxConfig{}, goodMachine()))
	privileged := goodContainer()
	containerSecurity(privileged).Privileged = true
	pod := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{Privileged: true}}}
	harness.Check(t, Container(privileged, pod, goodMachine()))
	named := goodContainer()
	containerSecurity(named).RunAsUser, containerSecurity(named).RunAsUsername = nil, "app"
	harness.Check(t, Container(named, nil, goodMachine()))
}

// Each of these is refused for its one field.
func TestContainerRefuses(t *testing.T) {
	for prefix, fields := range map[string]map[string][]any{
		"": {
			"metadata": {nil}, "metadata.name": {"", "../x", strings.Repeat("a", 254)}, "image": {nil}, "stop_signal": {999},
			"command[1]": {"\x00"}, "args[0]": {"a\x00"}, "working_dir": {"/\x00"}, "envs[0].key": {"", "A=B"}, "envs[0].value": {[]byte{0}},
			"log_path": {"/var/log/x", "a/../../x", "./"}, "windows": {&runtimeapi.WindowsContainerConfig{}},
			"mounts[0].container_path": {"", "a", "/a/../..", "//"}, "mounts[0].host_path": {"", "b"}, "mounts[0].mount_options[1]": {"rw"},
			"mounts[1].host_path": {"/b"}, "mounts[1].readonly": {false}, "mounts[2].propagation": {9},
			"mounts[2].gidMappings": {[]*runtimeapi.IDMapping{{}}}, "mounts[2].uidMappings": {nodetest.IDs(0, math.MaxUint32, 2)},
			"devices[0].host_path": {""}, "devices[1].container_path": {"y"}, "devices[0].permissions": {"", "rx"}, "CDI_devices[0].name": {"eth0"},

			"linux.resources.cpu_period": {-1, 999, 1_000_001}, "linux.resources.cpu_quota": {-2, 999, 1 << 44},
			"linux.resources.cpu_shares": {-1, 1, 1<<18 + 1}, "linux.resources.oom_score_adj": {-1001, 1001},
			"linux.resources.cpuset_cpus": {"0-8", "0,a", "3-1"}, "linux.resources.cpuset_mems": {"1", "0-"},
			"linux.resources.memory_limit_in_bytes": {-2}, "linux.resources.memory_swap_limit_in_bytes": {-2, 5},
			"linux.resources.hugepage_limits[0].page_size": {"16MB", "../x"},
		},
		"linux.security_context.": {
			"privileged": {true}, "capabilities.add_capabilities[1]": {"SYS_RESOURCE"}, "capabilities.add_ambient_capabilities[0]": {"SYS_RESOURCE"},
			"namespace_options.network": {7}, "namespace_options.ipc": {1}, "namespace_options.target_id": {""},
			"run_as_user": {-1, 1 << 31}, "run_as_username": {"app"}, "run_as_group": {-1}, "supplemental_groups[0]": {-1},
			"supplemental_groups_policy": {5}, "masked_paths[0]": {"proc"}, "readonly_paths[0]": {"/proc/../etc"},
			"seccomp.profile_type": {9}, "apparmor.profile_type": {9}, "seccomp": {localhostProfile("/nowhere/p.json")},
			"apparmor": {localhostProfile("web")},
		},
	} {
		for field, values := range fields {
			for _, value := range values {
				c := goodContainer()
				set(c.ProtoReflect(), prefix+field, value)
				wantRefusal(t, Container(c, &runtimeapi.PodSandboxConfig{}, goodMachine()), "config."+prefix+field)
			}
		}
	}
	for _, test := range []struct {
		field  string
		change func(*config)
	}{
		{"config.image", func(c *config) { c.Image.Image = "" }},
		{"config.mounts[1].image", func(c *config) { c.Mounts[1].Image.Image = "" }},
		{"config.mounts[0].recursive_read_only", func(c *config) { c.Mounts[0].Readonly = false }},
		{"config.mounts[0].recursive_read_only", func(c *config) { c.Mounts[0].Propagation = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER }},
		{"config.mounts[2].uidMappings", func(c *config) { c.Mounts[2].GidMappings = nil }},
		{"config.annotations", func(c *config) { c.Annotations["cdi.k8s.io/a"] = "x" }},
		{resourcesField + "memory_swap_limit_in_bytes", func(c *config) { limits(c).MemoryLimitInBytes = 0 }},
		{resourcesField + "memory_swap_limit_in_bytes", func(c *config) { limits(c).MemoryLimitInBytes = -1 }},
		{resourcesField + "unified[gpu.max]", func(c *config) { limits(c).Unified = map[string]string{"gpu.max": "1"} }},
		{resourcesField + "unified[a./../x]", func(c *config) { limits(c).Unified = map[string]string{"a./../x": "1"} }},
		{resourcesField + "unified[max]", func(c *config) { limits(c).Unified = map[string]string{"max": "1"} }},
		{nsField + "pid", func(c *config) { nsOptions(c).Pid, nsOptions(c).TargetId = 7, "" }},
		{nsField + "target_id", func(c *config) { nsOptions(c).Pid = runtimeapi.NamespaceMode_POD }},
		{nsField + "userns_options", func(c *config) {
			nsOptions(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: unmapped, Gids: unmapped}
		}},
		{nsField + "userns_options.mode", func(c *config) {
			nsOptions(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_TARGET}
		}},
		{securityContext + "run_as_group", func(c *config) { containerSecurity(c).RunAsUser = nil }},
		{securityContext + "run_as_username", func(c *config) { containerSecurity(c).RunAsUser, containerSecurity(c).RunAsUsername = nil, "1000" }},
		{securityContext + "run_as_username", func(c *config) { containerSecurity(c).RunAsUser, containerSecurity(c).RunAsUsername = nil, "a:b" }},
		{securityContext + "seccomp", func(c *config) {
			//lint:ignore SA1019 the older form is still sent
			containerSecurity(c).Seccomp, containerSecurity(c).SeccompProfilePath = nil, "localhost//nowhere/p.json"
		}},
		{securityContext + "apparmor", func(c *config) {
			//lint:ignore SA1019 the older form is still sent
			containerSecurity(c).Apparmor, containerSecurity(c).ApparmorProfile = nil, "localhost/web"
		}},
		// What is no form of a profile is not the default one.
		{securityContext + "seccomp", func(c *config) {
			//lint:ignore SA1019 the older form is still sent
			containerSecurity(c).Seccomp, containerSecurity(c).SeccompProfilePath = nil, "confined"
		}},
		{securityContext + "apparmor", func(c *config) {
			//lint:ignore SA1019 the older form is still sent
			containerSecurity(c).Apparmor, containerSecurity(c).ApparmorProfile = nil, "runtime-default"
		}},
	} {
		c := goodContainer()
		test.change(c)
		wantRefusal(t, Container(c, &runtimeapi.PodSandboxConfig{}, goodMachine()), test.field)
	}
	wantRefusal(t, Container(nil, nil, goodMachine()), "config")
}

// What a machine or the pod cannot give is refused, and named.
func TestContainerKnowsMachineAndPod(t *testing.T) {
	old := goodMachine()
	old.RecursiveReadOnly = false
	wantRefusal(t, Container(goodContainer(), nil, old), "config.mounts[0].recursive_read_only")
	v1 := goodMachine()
	v1.CgroupV2 = false
	wantRefusal(t, Container(goodContainer(), nil, v1), resourcesField+"unified")

	userns := &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: unmapped, Gids: unmapped}
	pod := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{UsernsOptions: userns},
	}}}
	same := goodContainer()
	nsOptions(same).UsernsOptions = proto.CloneOf(userns)
	harness.Check(t, Container(same, pod, goodMachine()))
	node := goodContainer()
	nsOptions(node).Pid, nsOptions(node).TargetId = runtimeapi.NamespaceMode_NODE, ""
	wantRefusal(t, Container(node, pod, goodMachine()), nsField+"pid")
	other := goodContainer()
	nsOptions(other).UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE}
	wantRefusal(t, Container(other, pod, goodMachine()), nsField+"userns_options")
}

// wantRefusal: InvalidArgument for this field and no other.
func wantRefusal(t *testing.T, err error, field string) {
	t.Helper()
	if !errdefs.IsInvalidArgument(err) {
		t.Errorf("got %v, want InvalidArgument for %s", err, field)
		return
	}
	_, complaints, _ := strings.Cut(err.Error(), ": ")
	for line := range strings.Lines(complaints) {
		harness.Want(t, strings.HasPrefix(line, field+": "), "got %q, want a complaint about %s alone", line, field)
	}
}

// FuzzContainer: no request makes the check panic; what it refuses is
// InvalidArgument, and with what it accepts no rule panics.
func FuzzContainer(f *testing.F) {
	for _, seed := range []*config{{}, goodContainer(), {Mounts: []*runtimeapi.Mount{{}}, Devices: []*runtimeapi.Device{{}}, CDIDevices: []*runtimeapi.CDIDevice{{}}}} {
		data, err := proto.Marshal(seed)
		harness.Check(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		request := &config{}
		if proto.Unmarshal(data, request) != nil {
			return // gRPC refuses it
		}
		if err := Container(request, nil, goodMachine()); err != nil {
			harness.Want(t, errdefs.IsInvalidArgument(err), "%v is not InvalidArgument", err)
			return
		}
		// Nothing of the fuzzer's is made or read on the host.
		request.Mounts, request.Devices, request.CDIDevices, request.Annotations = nil, nil, nil, nil
		c := &oci.Container{Config: request, Rootfs: t.TempDir(), Namespaces: oci.Namespaces{Net: "n", IPC: "i", UTS: "u", PID: "p"}}
		c.Files = oci.PodFiles{Hosts: "/", Hostname: "/", ResolvConf: "/", Shm: "/"}
		if oci.SeccompOf(request.GetLinux().GetSecurityContext()).GetProfileType() == runtimeapi.SecurityProfile_Localhost {
			return
		}
		_, _ = oci.ForContainer(c)
	})
}
