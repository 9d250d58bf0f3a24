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
		Metadata:   &runtimeapi.ContainerMetadata{Name: "nginx", Attempt: 3},
		Image:      &runtimeapi.ImageSpec{Image: "sha256:5e"},
		Command:    []string{"/bin/sh", ""},
		Args:       []string{"-c", "a\nb"},
		WorkingDir: "app",
		Envs:       []*pair{{Key: "A", Value: []byte("ä\x01\n=")}},
		LogPath:    "nginx/0.log",
		StopSignal: runtimeapi.Signal_SIGNAL_SIGRTMAX,
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
				Seccomp:  profileOf(runtimeapi.SecurityProfile_RuntimeDefault),
				Apparmor: profileOf(runtimeapi.SecurityProfile_Unconfined),
			},
		},
	}
}

func goodMachine() machine.Machine {
	return machine.Machine{CgroupV2: true, Controllers: []string{"cpu", "memory"}, RecursiveReadOnly: true, CPUs: 8, MemoryNodes: 1, HugepageSizes: []string{"1GB", "2MB"}, Capabilities: oci.DefaultCapabilities()}
}

func TestContainerAccepts(t *testing.T) {
	minimal := &config{Metadata: &runtimeapi.ContainerMetadata{Name: "a"}, Image: &runtimeapi.ImageSpec{Image: "b"}}
	if err := Container(minimal, nil, machine.Machine{}); err != nil {
		t.Errorf("the least: %v", err)
	}
	if err := Container(goodContainer(), &runtimeapi.PodSandboxConfig{}, goodMachine()); err != nil {
		t.Errorf("all at once: %v", err)
	}
	privileged := goodContainer()
	containerSecurity(privileged).Privileged = true
	pod := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{Privileged: true}}}
	if err := Container(privileged, pod, goodMachine()); err != nil {
		t.Errorf("privileged: %v", err)
	}
	named := goodContainer()
	containerSecurity(named).RunAsUser, containerSecurity(named).RunAsUsername = nil, "app"
	if err := Container(named, nil, goodMachine()); err != nil {
		t.Errorf("run_as_username: %v", err)
	}
}

// Each of these is refused for its one field.
func TestContainerRefuses(t *testing.T) {
	for _, test := range []struct {
		name, field string
		change      func(*config)
	}{
		{"no metadata", "config.metadata", func(c *config) { c.Metadata = nil }},
		{"no name", "config.metadata.name", func(c *config) { c.Metadata.Name = "" }},
		{"a name that leads elsewhere", "config.metadata.name", func(c *config) { c.Metadata.Name = "../x" }},
		{"a long name", "config.metadata.name", func(c *config) { c.Metadata.Name = strings.Repeat("a", 254) }},
		{"no image", "config.image", func(c *config) { c.Image = nil }},
		{"an image without a name", "config.image", func(c *config) { c.Image.Image = "" }},
		{"NUL in a command", "config.command[1]", func(c *config) { c.Command[1] = "\x00" }},
		{"NUL in an argument", "config.args[0]", func(c *config) { c.Args[0] = "a\x00" }},
		{"NUL in the directory", "config.working_dir", func(c *config) { c.WorkingDir = "/\x00" }},
		{"a variable without a name", "config.envs[0].key", func(c *config) { c.Envs[0].Key = "" }},
		{"a variable with = in its name", "config.envs[0].key", func(c *config) { c.Envs[0].Key = "A=B" }},
		{"NUL in a variable", "config.envs[0].value", func(c *config) { c.Envs[0].Value = []byte{0} }},
		{"an absolute log", "config.log_path", func(c *config) { c.LogPath = "/var/log/x" }},
		{"a log elsewhere", "config.log_path", func(c *config) { c.LogPath = "a/../../x" }},
		{"a log that is the directory", "config.log_path", func(c *config) { c.LogPath = "./" }},
		{"unknown signal", "config.stop_signal", func(c *config) { c.StopSignal = 999 }},

		{"mount without a place", "config.mounts[0].container_path", func(c *config) { c.Mounts[0].ContainerPath = "" }},
		{"mount in a relative place", "config.mounts[0].container_path", func(c *config) { c.Mounts[0].ContainerPath = "a" }},
		{"mount that leads up to the root", "config.mounts[0].container_path", func(c *config) { c.Mounts[0].ContainerPath = "/a/../.." }},
		{"mount on the root", "config.mounts[0].container_path", func(c *config) { c.Mounts[0].ContainerPath = "//" }},
		{"mount without a source", "config.mounts[0].host_path", func(c *config) { c.Mounts[0].HostPath = "" }},
		{"mount of a relative source", "config.mounts[0].host_path", func(c *config) { c.Mounts[0].HostPath = "b" }},
		{"mount of image and path", "config.mounts[1].host_path", func(c *config) { c.Mounts[1].HostPath = "/b" }},
		{"mount of an image without a name", "config.mounts[1].image", func(c *config) { c.Mounts[1].Image.Image = "" }},
		{"mount of an image to write to", "config.mounts[1].readonly", func(c *config) { c.Mounts[1].Readonly = false }},
		{"unknown propagation", "config.mounts[2].propagation", func(c *config) { c.Mounts[2].Propagation = 9 }},
		{"recursive read-only, but not read-only", "config.mounts[0].recursive_read_only", func(c *config) { c.Mounts[0].Readonly = false }},
		{"recursive read-only, not private", "config.mounts[0].recursive_read_only", func(c *config) { c.Mounts[0].Propagation = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER }},
		{"unknown mount option", "config.mounts[0].mount_options[1]", func(c *config) { c.Mounts[0].MountOptions[1] = "rw" }},
		{"uid mappings alone", "config.mounts[2].uidMappings", func(c *config) { c.Mounts[2].GidMappings = nil }},
		{"empty mapping", "config.mounts[2].gidMappings", func(c *config) { c.Mounts[2].GidMappings = []*runtimeapi.IDMapping{{}} }},
		{"mapping beyond the ids", "config.mounts[2].uidMappings", func(c *config) {
			c.Mounts[2].UidMappings = []*runtimeapi.IDMapping{{HostId: math.MaxUint32, Length: 2}}
		}},

		{"settings for Windows", "config.windows", func(c *config) { c.Windows = &runtimeapi.WindowsContainerConfig{} }},

		{"device without a source", "config.devices[0].host_path", func(c *config) { c.Devices[0].HostPath = "" }},
		{"device in a relative place", "config.devices[1].container_path", func(c *config) { c.Devices[1].ContainerPath = "y" }},
		{"device without permissions", "config.devices[0].permissions", func(c *config) { c.Devices[0].Permissions = "" }},
		{"device with other permissions", "config.devices[0].permissions", func(c *config) { c.Devices[0].Permissions = "rx" }},
		{"CDI device that is no name", "config.CDI_devices[0].name", func(c *config) { c.CDIDevices[0].Name = "eth0" }},
		{"CDI annotation that is no name", "config.annotations", func(c *config) { c.Annotations["cdi.k8s.io/a"] = "x" }},

		{"negative period", resourcesField + "cpu_period", func(c *config) { limits(c).CpuPeriod = -1 }},
		{"quota below none", resourcesField + "cpu_quota", func(c *config) { limits(c).CpuQuota = -2 }},
		{"a period that is too short", resourcesField + "cpu_period", func(c *config) { limits(c).CpuPeriod = 999 }},
		{"a period that is too long", resourcesField + "cpu_period", func(c *config) { limits(c).CpuPeriod = 1_000_001 }},
		{"a quota that the kernel does not take", resourcesField + "cpu_quota", func(c *config) { limits(c).CpuQuota = 1 << 44 }},
		{"a quota that is too small", resourcesField + "cpu_quota", func(c *config) { limits(c).CpuQuota = 999 }},
		{"too few shares", resourcesField + "cpu_shares", func(c *config) { limits(c).CpuShares = 1 }},
		{"too many shares", resourcesField + "cpu_shares", func(c *config) { limits(c).CpuShares = 1<<18 + 1 }},
		{"cpus of another machine", resourcesField + "cpuset_cpus", func(c *config) { limits(c).CpusetCpus = "0-8" }},
		{"mems of another machine", resourcesField + "cpuset_mems", func(c *config) { limits(c).CpusetMems = "1" }},
		{"negative shares", resourcesField + "cpu_shares", func(c *config) { limits(c).CpuShares = -1 }},
		{"negative memory", resourcesField + "memory_limit_in_bytes", func(c *config) { limits(c).MemoryLimitInBytes = -2 }},
		{"negative swap", resourcesField + "memory_swap_limit_in_bytes", func(c *config) { limits(c).MemorySwapLimitInBytes = -2 }},
		{"swap without memory", resourcesField + "memory_swap_limit_in_bytes", func(c *config) { limits(c).MemoryLimitInBytes = 0 }},
		{"swap, and no limit of memory", resourcesField + "memory_swap_limit_in_bytes", func(c *config) { limits(c).MemoryLimitInBytes = -1 }},
		{"unknown controller", resourcesField + "unified[gpu.max]", func(c *config) { limits(c).Unified = map[string]string{"gpu.max": "1"} }},
		{"less swap than memory", resourcesField + "memory_swap_limit_in_bytes", func(c *config) { limits(c).MemorySwapLimitInBytes = 5 }},
		{"oom score too low", resourcesField + "oom_score_adj", func(c *config) { limits(c).OomScoreAdj = -1001 }},
		{"oom score too high", resourcesField + "oom_score_adj", func(c *config) { limits(c).OomScoreAdj = 1001 }},
		{"cpus that are no list", resourcesField + "cpuset_cpus", func(c *config) { limits(c).CpusetCpus = "0,a" }},
		{"cpus backwards", resourcesField + "cpuset_cpus", func(c *config) { limits(c).CpusetCpus = "3-1" }},
		{"mems that are no list", resourcesField + "cpuset_mems", func(c *config) { limits(c).CpusetMems = "0-" }},
		{"huge pages of another machine", resourcesField + "hugepage_limits[0].page_size", func(c *config) { limits(c).HugepageLimits[0].PageSize = "16MB" }},
		{"huge pages of no size", resourcesField + "hugepage_limits[0].page_size", func(c *config) { limits(c).HugepageLimits[0].PageSize = "../x" }},
		{"key that leads elsewhere", resourcesField + "unified[a./../x]", func(c *config) { limits(c).Unified = map[string]string{"a./../x": "1"} }},
		{"key without a controller", resourcesField + "unified[max]", func(c *config) { limits(c).Unified = map[string]string{"max": "1"} }},

		{"privileged in a pod that is not", securityContext + "privileged", func(c *config) { containerSecurity(c).Privileged = true }},
		{"unknown capability added", securityContext + "capabilities.add_capabilities[1]", func(c *config) { containerSecurity(c).Capabilities.AddCapabilities[1] = "FLY" }},
		{"unknown capability dropped", securityContext + "capabilities.drop_capabilities[0]", func(c *config) { containerSecurity(c).Capabilities.DropCapabilities[0] = "FLY" }},
		{"unknown ambient capability", securityContext + "capabilities.add_ambient_capabilities[0]", func(c *config) { containerSecurity(c).Capabilities.AddAmbientCapabilities[0] = "" }},
		{"capability that the daemon has not", securityContext + "capabilities.add_capabilities[1]", func(c *config) { containerSecurity(c).Capabilities.AddCapabilities[1] = "SYS_RESOURCE" }},

		{"unknown network", nsField + "network", func(c *config) { nsOptions(c).Network = 7 }},
		{"unknown ipc", nsField + "ipc", func(c *config) { nsOptions(c).Ipc = runtimeapi.NamespaceMode_CONTAINER }},
		{"unknown pid", nsField + "pid", func(c *config) { nsOptions(c).Pid, nsOptions(c).TargetId = 7, "" }},
		{"target without an id", nsField + "target_id", func(c *config) { nsOptions(c).TargetId = "" }},
		{"an id without a target", nsField + "target_id", func(c *config) { nsOptions(c).Pid = runtimeapi.NamespaceMode_POD }},
		{"another user namespace than the pod's", nsField + "userns_options", func(c *config) {
			nsOptions(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: unmapped, Gids: unmapped}
		}},
		{"unknown user namespace", nsField + "userns_options.mode", func(c *config) {
			nsOptions(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_TARGET}
		}},

		{"negative user", securityContext + "run_as_user", func(c *config) { containerSecurity(c).RunAsUser.Value = -1 }},
		{"user beyond the ids", securityContext + "run_as_user", func(c *config) { containerSecurity(c).RunAsUser.Value = 1 << 31 }},
		{"user twice", securityContext + "run_as_username", func(c *config) { containerSecurity(c).RunAsUsername = "app" }},
		{"group without a user", securityContext + "run_as_group", func(c *config) { containerSecurity(c).RunAsUser = nil }},
		{"negative group", securityContext + "run_as_group", func(c *config) { containerSecurity(c).RunAsGroup.Value = -1 }},
		{"number as a name", securityContext + "run_as_username", func(c *config) { containerSecurity(c).RunAsUser, containerSecurity(c).RunAsUsername = nil, "1000" }},
		{"name with a group", securityContext + "run_as_username", func(c *config) { containerSecurity(c).RunAsUser, containerSecurity(c).RunAsUsername = nil, "a:b" }},
		{"negative supplemental group", securityContext + "supplemental_groups[0]", func(c *config) { containerSecurity(c).SupplementalGroups[0] = -1 }},
		{"unknown policy", securityContext + "supplemental_groups_policy", func(c *config) { containerSecurity(c).SupplementalGroupsPolicy = 5 }},

		{"relative masked path", securityContext + "masked_paths[0]", func(c *config) { containerSecurity(c).MaskedPaths[0] = "proc" }},
		{"readonly path that leads up", securityContext + "readonly_paths[0]", func(c *config) { containerSecurity(c).ReadonlyPaths[0] = "/proc/../etc" }},
		{"unknown seccomp type", securityContext + "seccomp.profile_type", func(c *config) { containerSecurity(c).Seccomp.ProfileType = 9 }},
		{"unknown AppArmor type", securityContext + "apparmor.profile_type", func(c *config) { containerSecurity(c).Apparmor.ProfileType = 9 }},
		{"missing seccomp profile", securityContext + "seccomp", func(c *config) { containerSecurity(c).Seccomp = localhostProfile("/nowhere/p.json") }},
		{"missing seccomp profile, older form", securityContext + "seccomp", func(c *config) {
			//lint:ignore SA1019 the older form is still sent
			containerSecurity(c).Seccomp, containerSecurity(c).SeccompProfilePath = nil, "localhost//nowhere/p.json"
		}},
		{"AppArmor by name where there is none", securityContext + "apparmor", func(c *config) { containerSecurity(c).Apparmor = localhostProfile("web") }},
		{"AppArmor by name, older form", securityContext + "apparmor", func(c *config) {
			//lint:ignore SA1019 the older form is still sent
			containerSecurity(c).Apparmor, containerSecurity(c).ApparmorProfile = nil, "localhost/web"
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := goodContainer()
			test.change(c)
			wantRefusal(t, Container(c, &runtimeapi.PodSandboxConfig{}, goodMachine()), test.field)
		})
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
	if err := Container(same, pod, goodMachine()); err != nil {
		t.Errorf("the pod's own user namespace: %v", err)
	}
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
		t.Fatalf("got %v, want InvalidArgument for %s", err, field)
	}
	_, complaints, _ := strings.Cut(err.Error(), ": ")
	for line := range strings.Lines(complaints) {
		if !strings.HasPrefix(line, field+": ") {
			t.Errorf("got %q, want a complaint about %s alone", line, field)
		}
	}
}

// FuzzContainer: no request makes the check panic; what it refuses is
// InvalidArgument, and with what it accepts no rule panics.
func FuzzContainer(f *testing.F) {
	for _, seed := range []*config{{}, goodContainer(), {Mounts: []*runtimeapi.Mount{{}}, Devices: []*runtimeapi.Device{{}}, CDIDevices: []*runtimeapi.CDIDevice{{}}}} {
		data, err := proto.Marshal(seed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		request := &config{}
		if proto.Unmarshal(data, request) != nil {
			return // gRPC refuses it
		}
		if err := Container(request, nil, goodMachine()); err != nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("%v is not InvalidArgument", err)
			}
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
