package validate

import (
	"math"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

const (
	ofPod       = runtimeapi.NamespaceMode_POD
	ofContainer = runtimeapi.NamespaceMode_CONTAINER
	ofNode      = runtimeapi.NamespaceMode_NODE
	ofTarget    = runtimeapi.NamespaceMode_TARGET
)

// goodConfig asks for all that a pod can ask for at once.
func goodConfig() *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: "web-0", Namespace: "default", Uid: "3f0c-11", Attempt: 1},
		Hostname:     "web-0.example",
		LogDirectory: "/var/log/pods/default_web-0_3f0c-11",
		DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10", "fd00::a"}, Searches: []string{"svc.local"}, Options: []string{"ndots:5"}},
		PortMappings: []*runtimeapi.PortMapping{
			{Protocol: runtimeapi.Protocol_TCP, ContainerPort: 80, HostPort: 8080},
			{Protocol: runtimeapi.Protocol_UDP, ContainerPort: 53, HostPort: 65535, HostIp: "127.0.0.1"},
			{Protocol: runtimeapi.Protocol_SCTP, ContainerPort: 65535, HostIp: "::1"},
			{},
		},
		Labels:      map[string]string{"app": "web", "": ""},
		Annotations: map[string]string{IngressBandwidth: "10M", EgressBandwidth: "1Gi", "any": "thing\n"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: "/kubepods/pod3f0c",
			Sysctls:      map[string]string{"net.core.somaxconn": "512", "kernel.shm_rmid_forced": "1"},
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				RunAsUser: &runtimeapi.Int64Value{Value: 1000}, RunAsGroup: &runtimeapi.Int64Value{Value: 0},
				SupplementalGroups:       []int64{0, math.MaxUint32 - 1},
				SupplementalGroupsPolicy: runtimeapi.SupplementalGroupsPolicy_Strict,
				Seccomp:                  &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
				Apparmor:                 &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: ofContainer, UsernsOptions: &runtimeapi.UserNamespace{
					Mode: ofPod, Uids: ids(0, 65536, 1000, 2000, 100000, 10), Gids: ids(0, 65536, 65536),
				}},
			},
		},
	}
}

// ids makes mappings of container id, host id and length, three by three.
func ids(numbers ...uint32) (mappings []*runtimeapi.IDMapping) {
	for of := range slices.Chunk(numbers, 3) {
		mappings = append(mappings, &runtimeapi.IDMapping{ContainerId: of[0], HostId: of[1], Length: of[2]})
	}
	return mappings
}

func security(c *runtimeapi.PodSandboxConfig) *runtimeapi.LinuxSandboxSecurityContext {
	return c.Linux.SecurityContext
}

func options(c *runtimeapi.PodSandboxConfig) *runtimeapi.NamespaceOption {
	return c.Linux.SecurityContext.NamespaceOptions
}

func goodNode() Node {
	return Node{Handlers: []string{"runc"}, Machine: machine.Machine{UserNamespaces: true}}
}

func TestPodAccepts(t *testing.T) {
	for name, config := range map[string]*runtimeapi.PodSandboxConfig{
		"all at once": goodConfig(),
		"a user namespace in the node's network": {
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "a"},
			Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: ofNode, UsernsOptions: &runtimeapi.UserNamespace{Mode: ofPod, Uids: ids(0, 65536, 65536), Gids: ids(0, 65536, 65536)}},
			}},
		},
		"nothing but a name": {Metadata: &runtimeapi.PodSandboxMetadata{Name: "a"}},
		"all of the node": {
			Metadata: &runtimeapi.PodSandboxMetadata{Name: strings.Repeat("n", longestName)},
			Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				Privileged:       true,
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: ofNode, Pid: ofNode, Ipc: ofNode, UsernsOptions: &runtimeapi.UserNamespace{Mode: ofNode}},
			}},
		},
	} {
		for _, handler := range []string{"", "runc"} {
			if err := Pod(config, handler, goodNode()); err != nil {
				t.Errorf("%s, handler %q: %v", name, handler, err)
			}
		}
	}
}

// Every malformed field is refused, by its name, and by no other.
//
// cri: LinuxPodSandboxConfig.security_context LinuxSandboxSecurityContext.namespace_options NamespaceOption.ipc
func TestPodRefuses(t *testing.T) {
	const securityField, namespaceField = "config.linux.security_context.", "config.linux.security_context.namespace_options."
	localhost := func(ref string) *runtimeapi.SecurityProfile {
		return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: ref}
	}
	type config = runtimeapi.PodSandboxConfig
	for _, test := range []struct {
		name, field string
		change      func(*config)
	}{
		{"no metadata", "config.metadata", func(c *config) { c.Metadata = nil }},
		{"no name", "config.metadata.name", func(c *config) { c.Metadata.Name = "" }},
		{"NUL in the name", "config.metadata.name", func(c *config) { c.Metadata.Name = "a\x00b" }},
		{"'..' as the name", "config.metadata.name", func(c *config) { c.Metadata.Name = ".." }},
		{"'.' as the name", "config.metadata.name", func(c *config) { c.Metadata.Name = "." }},
		{"'..' in the name", "config.metadata.name", func(c *config) { c.Metadata.Name = "a..b" }},
		{"a path as the name", "config.metadata.name", func(c *config) { c.Metadata.Name = "../../etc" }},
		{"CNI_ARGS in the name", "config.metadata.name", func(c *config) { c.Metadata.Name = "a;IP=10.0.0.1" }},
		{"a line break in the name", "config.metadata.name", func(c *config) { c.Metadata.Name = "a\nb" }},
		{"no UTF-8 in the name", "config.metadata.name", func(c *config) { c.Metadata.Name = "a\xff" }},
		{"too long a name", "config.metadata.name", func(c *config) { c.Metadata.Name = strings.Repeat("n", longestName+1) }},
		{"NUL in the namespace", "config.metadata.namespace", func(c *config) { c.Metadata.Namespace = "\x00" }},
		{"'..' in the namespace", "config.metadata.namespace", func(c *config) { c.Metadata.Namespace = ".." }},
		{"a slash in the namespace", "config.metadata.namespace", func(c *config) { c.Metadata.Namespace = "a/b" }},
		{"NUL in the uid", "config.metadata.uid", func(c *config) { c.Metadata.Uid = "u\x00" }},
		{"'..' in the uid", "config.metadata.uid", func(c *config) { c.Metadata.Uid = "../u" }},
		{"'=' in the uid", "config.metadata.uid", func(c *config) { c.Metadata.Uid = "u=1" }},

		{"over-long hostname", "config.hostname", func(c *config) { c.Hostname = strings.Repeat("h", longestHostname+1) }},
		{"a hostname in the node's network", "config.hostname", func(c *config) { options(c).Network, c.Linux.Sysctls = ofNode, nil }},
		{"NUL in the hostname", "config.hostname", func(c *config) { c.Hostname = "a\x00" }},
		{"a path as the hostname", "config.hostname", func(c *config) { c.Hostname = "../a" }},
		{"a line break in the hostname", "config.hostname", func(c *config) { c.Hostname = "a\n127.0.0.1 b" }},

		{"relative log directory", "config.log_directory", func(c *config) { c.LogDirectory = "var/log" }},
		{"'..' in the log directory", "config.log_directory", func(c *config) { c.LogDirectory = "/var/log/../../etc" }},
		{"NUL in the log directory", "config.log_directory", func(c *config) { c.LogDirectory = "/var/log\x00" }},

		{"an empty server", "config.dns_config.servers[1]", func(c *config) { c.DnsConfig.Servers[1] = "" }},
		{"a line break in a server", "config.dns_config.servers[0]", func(c *config) { c.DnsConfig.Servers[0] = "1.1.1.1\nsearch x" }},
		{"two words as a search", "config.dns_config.searches[0]", func(c *config) { c.DnsConfig.Searches[0] = "a b" }},
		{"NUL in an option", "config.dns_config.options[0]", func(c *config) { c.DnsConfig.Options[0] = "a\x00" }},

		{"unknown protocol", "config.port_mappings[0].protocol", func(c *config) { c.PortMappings[0].Protocol = 3 }},
		{"negative host port", "config.port_mappings[0].host_port", func(c *config) { c.PortMappings[0].HostPort = -1 }},
		{"host port beyond the last", "config.port_mappings[1].host_port", func(c *config) { c.PortMappings[1].HostPort = 65536 }},
		{"negative container port", "config.port_mappings[2].container_port", func(c *config) { c.PortMappings[2].ContainerPort = -1 }},
		{"container port beyond the last", "config.port_mappings[2].container_port", func(c *config) { c.PortMappings[2].ContainerPort = 70000 }},
		{"a host port to no port", "config.port_mappings[0].container_port", func(c *config) { c.PortMappings[0].ContainerPort = 0 }},
		{"a name as host ip", "config.port_mappings[1].host_ip", func(c *config) { c.PortMappings[1].HostIp = "localhost" }},

		{"a label that is no text", "config.labels", func(c *config) { c.Labels["a"] = "\xff" }},
		{"a label's key that is no text", "config.labels", func(c *config) { c.Labels["\xff"] = "a" }},
		{"an annotation that is no text", "config.annotations", func(c *config) { c.Annotations["a"] = "\xff" }},
		{"labels beyond what a list holds", "config.labels", func(c *config) { c.Labels["a"] = strings.Repeat("x", mostText) }},
		{"annotations beyond what a list holds", "config.annotations", func(c *config) { c.Annotations["a"] = strings.Repeat("x", mostText) }},
		{"settings for Windows", "config.windows", func(c *config) { c.Windows = &runtimeapi.WindowsPodSandboxConfig{} }},
		{"negative overhead", "config.linux.overhead.cpu_shares", func(c *config) { c.Linux.Overhead = &runtimeapi.LinuxContainerResources{CpuShares: -5} }},
		{"negative resources", "config.linux.resources.memory_limit_in_bytes", func(c *config) {
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -5}
		}},
		{"a bandwidth that is no quantity", "config.annotations[" + IngressBandwidth + "]", func(c *config) { c.Annotations[IngressBandwidth] = "fast" }},
		{"too little bandwidth", "config.annotations[" + EgressBandwidth + "]", func(c *config) { c.Annotations[EgressBandwidth] = "999" }},
		{"too much bandwidth", "config.annotations[" + EgressBandwidth + "]", func(c *config) { c.Annotations[EgressBandwidth] = "2P" }},

		{"'..' in the cgroup parent", "config.linux.cgroup_parent", func(c *config) { c.Linux.CgroupParent = "/a/../.." }},
		{"NUL in the cgroup parent", "config.linux.cgroup_parent", func(c *config) { c.Linux.CgroupParent = "/a\x00" }},

		{"a sysctl of the node", "config.linux.sysctls[kernel.panic]", func(c *config) { c.Linux.Sysctls["kernel.panic"] = "1" }},
		{"a sysctl that leads elsewhere", "config.linux.sysctls[net/../kernel/panic]", func(c *config) { c.Linux.Sysctls["net/../kernel/panic"] = "1" }},
		{"a sysctl without a name", "config.linux.sysctls[]", func(c *config) { c.Linux.Sysctls[""] = "1" }},
		{"NUL in a sysctl's value", "config.linux.sysctls[net.core.somaxconn]", func(c *config) { c.Linux.Sysctls["net.core.somaxconn"] = "1\x00" }},
		{"a sysctl twice, in both spellings", "config.linux.sysctls[net/core/somaxconn]", func(c *config) { c.Linux.Sysctls["net/core/somaxconn"] = "1" }},
		{"a sysctl of the node's network", "config.linux.sysctls[net.core.somaxconn]", func(c *config) {
			c.Hostname, options(c).UsernsOptions, options(c).Network = "", nil, ofNode
		}},
		{"a sysctl of the node's IPC", "config.linux.sysctls[kernel.shm_rmid_forced]", func(c *config) { options(c).UsernsOptions = nil; options(c).Ipc = ofNode }},

		{"unknown network mode", namespaceField + "network", func(c *config) { options(c).Network = 9 }},
		{"network mode of a container", namespaceField + "network", func(c *config) { options(c).Network = ofContainer }},
		{"unknown pid mode", namespaceField + "pid", func(c *config) { options(c).Pid = -1 }},
		{"pid mode TARGET", namespaceField + "pid", func(c *config) { options(c).Pid = ofTarget }},
		{"unknown ipc mode", namespaceField + "ipc", func(c *config) { options(c).Ipc = 4 }},
		{"ipc mode of a container", namespaceField + "ipc", func(c *config) { options(c).Ipc = ofContainer }},
		{"a target", namespaceField + "target_id", func(c *config) { options(c).TargetId = "abc" }},

		{"unknown userns mode", namespaceField + "userns_options.mode", func(c *config) { options(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: 7} }},
		{"userns mode of a container", namespaceField + "userns_options.mode", func(c *config) { options(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: ofContainer} }},
		{"mappings without a user namespace", namespaceField + "userns_options", func(c *config) { options(c).UsernsOptions.Mode = ofNode }},
		{"no uids", namespaceField + "userns_options.uids", func(c *config) { options(c).UsernsOptions.Uids = nil }},
		{"no gids", namespaceField + "userns_options.gids", func(c *config) { options(c).UsernsOptions.Gids = nil }},
		{"an empty mapping", namespaceField + "userns_options.uids", func(c *config) { options(c).UsernsOptions.Uids[1].Length = 0 }},
		{"overlapping container ids", namespaceField + "userns_options.uids", func(c *config) { options(c).UsernsOptions.Uids = ids(0, 1000, 10, 9, 5000, 10) }},
		{"overlapping host ids", namespaceField + "userns_options.gids", func(c *config) { options(c).UsernsOptions.Gids = ids(0, 1000, 10, 100, 991, 10) }},
		{"a mapping beyond the ids", namespaceField + "userns_options.uids", func(c *config) { options(c).UsernsOptions.Uids = ids(0, math.MaxUint32-5, 10) }},
		{"a pod without root", namespaceField + "userns_options.gids", func(c *config) { options(c).UsernsOptions.Gids = ids(1, 1000, 10) }},
		{"too many mappings", namespaceField + "userns_options.uids", func(c *config) { options(c).UsernsOptions.Uids = manyMappings(mostMappings + 1) }},
		{"a user namespace with the node's pids", namespaceField + "pid", func(c *config) { options(c).Pid = ofNode }},
		{"a user namespace with the node's ipc", namespaceField + "ipc", func(c *config) { options(c).Ipc = ofNode; c.Linux.Sysctls = nil }},

		{"negative user", securityField + "run_as_user", func(c *config) { security(c).RunAsUser.Value = -1 }},
		{"the user that is none", securityField + "run_as_user", func(c *config) { security(c).RunAsUser.Value = math.MaxUint32 }},
		{"group beyond the ids", securityField + "run_as_group", func(c *config) { security(c).RunAsGroup.Value = 1 << 33 }},
		{"group without a user", securityField + "run_as_group", func(c *config) { security(c).RunAsUser = nil }},
		{"negative supplemental group", securityField + "supplemental_groups[1]", func(c *config) { security(c).SupplementalGroups[1] = -5 }},
		{"unknown policy", securityField + "supplemental_groups_policy", func(c *config) { security(c).SupplementalGroupsPolicy = 2 }},

		{"unknown seccomp profile type", securityField + "seccomp.profile_type", func(c *config) { security(c).Seccomp.ProfileType = 3 }},
		{"unknown AppArmor profile type", securityField + "apparmor.profile_type", func(c *config) { security(c).Apparmor.ProfileType = -2 }},
		{"relative seccomp profile", securityField + "seccomp", func(c *config) { security(c).Seccomp = localhost("profile.json") }},
		{"missing seccomp profile", securityField + "seccomp", func(c *config) { security(c).Seccomp = localhost("/nowhere/profile.json") }},
		{"missing seccomp profile, in the older form", securityField + "seccomp", func(c *config) {
			security(c).Seccomp = nil
			//lint:ignore SA1019 an older kubelet sends it
			security(c).SeccompProfilePath = "localhost//nowhere/profile.json"
		}},
		{"AppArmor by name where there is none", securityField + "apparmor", func(c *config) { security(c).Apparmor = localhost("web") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := goodConfig()
			test.change(c)
			wantRefusal(t, Pod(c, "runc", goodNode()), test.field)
		})
	}
	t.Run("no config", func(t *testing.T) { wantRefusal(t, Pod(nil, "", goodNode()), "config") })
	t.Run("unknown handler", func(t *testing.T) { wantRefusal(t, Pod(goodConfig(), "kata", goodNode()), "runtime_handler") })
	t.Run("user namespaces where overlays cannot be mapped", func(t *testing.T) {
		old := goodNode()
		old.Machine.UserNamespaces = false
		wantRefusal(t, Pod(goodConfig(), "", old), namespaceField+"userns_options")
	})
	t.Run("an AppArmor profile that is not loaded", func(t *testing.T) {
		confined, config := goodNode(), goodConfig()
		confined.Machine.AppArmor, security(config).Apparmor = true, localhost("web")
		wantRefusal(t, Pod(config, "", confined), securityField+"apparmor")
	})
	t.Run("no slice for the systemd driver", func(t *testing.T) {
		systemd := goodNode()
		systemd.SystemdCgroup = true
		wantRefusal(t, Pod(goodConfig(), "", systemd), "config.linux.cgroup_parent")
	})
}

func manyMappings(n uint32) (mappings []*runtimeapi.IDMapping) {
	for i := range n {
		mappings = append(mappings, ids(i, 1000+i, 1)...)
	}
	return mappings
}

// All that is wrong is reported at once.
func TestPodTellsAll(t *testing.T) {
	err := Pod(&runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{}, LogDirectory: "x", Hostname: "/",
	}, "kata", goodNode())
	for _, field := range []string{"runtime_handler", "config.metadata.name", "config.hostname", "config.log_directory"} {
		if err == nil || !strings.Contains(err.Error(), field+": ") {
			t.Errorf("%v does not name %s", err, field)
		}
	}
}
