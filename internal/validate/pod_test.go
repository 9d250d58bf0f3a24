package validate

import (
	"math"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/test/harness"
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
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web-0", Namespace: "default", Uid: "3f0c-11", Attempt: 1},
		Hostname: "web-0.example", LogDirectory: "/var/log/pods/default_web-0_3f0c-11",
		DnsConfig: &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10", "fd00::a"}, Searches: []string{"svc.local"}, Options: []string{"ndots:5"}},
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
			err := Pod(config, handler, goodNode())
			harness.Want(t, err == nil, "%s, handler %q: %v", name, handler, err)
		}
	}
}

// Every malformed field is refused, by its name, and by no other.
//
// cri: LinuxPodSandboxConfig.security_context LinuxSandboxSecurityContext.namespace_options NamespaceOption.ipc
func TestPodRefuses(t *testing.T) {
	const securityField, namespaceField = "config.linux.security_context.", "config.linux.security_context.namespace_options."
	type config = runtimeapi.PodSandboxConfig
	for field, values := range map[string][]any{
		"metadata":           {nil},
		"metadata.name":      {"", "a\x00b", "..", ".", "a..b", "../../etc", "a;IP=10.0.0.1", "a\nb", "a\xff", strings.Repeat("n", longestName+1)},
		"metadata.namespace": {"\x00", "..", "a/b"}, "metadata.uid": {"u\x00", "../u", "u=1"},
		"hostname":      {strings.Repeat("h", longestHostname+1), "a\x00", "../a", "a\n127.0.0.1 b"},
		"log_directory": {"var/log", "/var/log/../../etc", "/var/log\x00"},

		"dns_config.servers[1]": {""}, "dns_config.servers[0]": {"1.1.1.1\nsearch x"}, "dns_config.searches[0]": {"a b"}, "dns_config.options[0]": {"a\x00"},
		"port_mappings[0].protocol": {3}, "port_mappings[0].host_port": {-1}, "port_mappings[1].host_port": {65536},
		"port_mappings[2].container_port": {-1, 70000}, "port_mappings[0].container_port": {0}, "port_mappings[1].host_ip": {"localhost"},
		"windows": {&runtimeapi.WindowsPodSandboxConfig{}}, "linux.cgroup_parent": {"/a/../..", "/a\x00"},

		"linux.security_context.namespace_options.network": {9, 1}, "linux.security_context.namespace_options.pid": {-1, 2, 3},
		"linux.security_context.namespace_options.ipc": {4, 1}, "linux.security_context.namespace_options.target_id": {"abc"},
		"linux.security_context.namespace_options.userns_options.uids": {nil, ids(0, 1000, 10, 9, 5000, 10), ids(0, math.MaxUint32-5, 10), manyMappings(maxMappings + 1)},
		"linux.security_context.namespace_options.userns_options.gids": {nil, ids(0, 1000, 10, 100, 991, 10), ids(1, 1000, 10)},
		"linux.security_context.run_as_user":                           {-1, math.MaxUint32}, "linux.security_context.run_as_group": {1 << 33},
		"linux.security_context.supplemental_groups[1]": {-5}, "linux.security_context.supplemental_groups_policy": {2},
		"linux.security_context.seccomp.profile_type": {3}, "linux.security_context.apparmor.profile_type": {-2},
		"linux.security_context.seccomp":  {localhostProfile("profile.json"), localhostProfile("/nowhere/profile.json")},
		"linux.security_context.apparmor": {localhostProfile("web")},
	} {
		for _, value := range values {
			c := goodConfig()
			set(c.ProtoReflect(), field, value)
			wantRefusal(t, Pod(c, "runc", goodNode()), "config."+field)
		}
	}
	for _, test := range []struct {
		field  string
		change func(*config)
	}{
		{"config.hostname", func(c *config) { options(c).Network, c.Linux.Sysctls = ofNode, nil }},
		{"config.labels", func(c *config) { c.Labels["a"] = "\xff" }},
		{"config.labels", func(c *config) { c.Labels["\xff"] = "a" }},
		{"config.annotations", func(c *config) { c.Annotations["a"] = "\xff" }},
		{"config.labels", func(c *config) { c.Labels["a"] = strings.Repeat("x", maxText) }},
		{"config.annotations", func(c *config) { c.Annotations["a"] = strings.Repeat("x", maxText) }},
		{"config.linux.overhead.cpu_shares", func(c *config) { c.Linux.Overhead = &runtimeapi.LinuxContainerResources{CpuShares: -5} }},
		{"config.linux.resources.memory_limit_in_bytes", func(c *config) {
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -5}
		}},
		{"config.annotations[" + IngressBandwidth + "]", func(c *config) { c.Annotations[IngressBandwidth] = "fast" }},
		{"config.annotations[" + EgressBandwidth + "]", func(c *config) { c.Annotations[EgressBandwidth] = "999" }},
		{"config.annotations[" + EgressBandwidth + "]", func(c *config) { c.Annotations[EgressBandwidth] = "2P" }},
		{"config.linux.sysctls[kernel.panic]", func(c *config) { c.Linux.Sysctls["kernel.panic"] = "1" }},
		{"config.linux.sysctls[net.core.somaxconn]", func(c *config) { c.Linux.Sysctls["net.core.somaxconn"] = "1\x00" }},
		{"config.linux.sysctls[net/core/somaxconn]", func(c *config) { c.Linux.Sysctls["net/core/somaxconn"] = "1" }},
		{"config.linux.sysctls[net.core.somaxconn]", func(c *config) {
			c.Hostname, options(c).UsernsOptions, options(c).Network = "", nil, ofNode
		}},
		{"config.linux.sysctls[kernel.shm_rmid_forced]", func(c *config) { options(c).UsernsOptions = nil; options(c).Ipc = ofNode }},
		{namespaceField + "userns_options.mode", func(c *config) { options(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: 7} }},
		{namespaceField + "userns_options.mode", func(c *config) { options(c).UsernsOptions = &runtimeapi.UserNamespace{Mode: ofContainer} }},
		{namespaceField + "userns_options", func(c *config) { options(c).UsernsOptions.Mode = ofNode }},
		{namespaceField + "userns_options.uids", func(c *config) { options(c).UsernsOptions.Uids[1].Length = 0 }},
		{namespaceField + "ipc", func(c *config) { options(c).Ipc = ofNode; c.Linux.Sysctls = nil }},
		{securityField + "run_as_group", func(c *config) { security(c).RunAsUser = nil }},
		{securityField + "seccomp", func(c *config) {
			security(c).Seccomp = nil
			//lint:ignore SA1019 an older kubelet sends it
			security(c).SeccompProfilePath = "localhost//nowhere/profile.json"
		}},
	} {
		c := goodConfig()
		test.change(c)
		wantRefusal(t, Pod(c, "runc", goodNode()), test.field)
	}
	wantRefusal(t, Pod(nil, "", goodNode()), "config")
	wantRefusal(t, Pod(goodConfig(), "kata", goodNode()), "runtime_handler")
	old, confined, systemd, profiled := goodNode(), goodNode(), goodNode(), goodConfig()
	old.Machine.UserNamespaces = false // overlays cannot be mapped
	wantRefusal(t, Pod(goodConfig(), "", old), namespaceField+"userns_options")
	confined.Machine.AppArmor, security(profiled).Apparmor = true, localhostProfile("web") // which is not loaded
	wantRefusal(t, Pod(profiled, "", confined), securityField+"apparmor")
	systemd.SystemdCgroup = true
	wantRefusal(t, Pod(goodConfig(), "", systemd), "config.linux.cgroup_parent")
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
		harness.Want(t, err != nil && strings.Contains(err.Error(), field+": "), "%v does not name %s", err, field)
	}
}
