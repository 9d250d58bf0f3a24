package validate

import (
	"math"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// set gives a field a value, by the path that a refusal names it by: "mounts[0].host_path".
func set(m protoreflect.Message, path string, value any) {
	name, rest, deeper := strings.Cut(path, ".")
	name, index, element := strings.Cut(strings.TrimSuffix(name, "]"), "[")
	field := m.Descriptor().Fields().ByName(protoreflect.Name(name))
	i, _ := strconv.Atoi(index)
	switch {
	case deeper && element:
		set(m.Mutable(field).List().Get(i).Message(), rest, value)
	case deeper:
		set(m.Mutable(field).Message(), rest, value)
	case value == nil:
		m.Clear(field)
	case element:
		m.Mutable(field).List().Set(i, valueOf(field, value))
	case field.IsList():
		m.Clear(field)
		for _, mapping := range value.([]*runtimeapi.IDMapping) {
			m.Mutable(field).List().Append(protoreflect.ValueOf(mapping.ProtoReflect()))
		}
	default:
		m.Set(field, valueOf(field, value))
	}
}

func valueOf(field protoreflect.FieldDescriptor, value any) protoreflect.Value {
	if message, is := value.(proto.Message); is {
		return protoreflect.ValueOf(message.ProtoReflect())
	}
	n, is := value.(int)
	switch {
	case !is:
		return protoreflect.ValueOf(value)
	case field.Kind() == protoreflect.EnumKind:
		return protoreflect.ValueOf(protoreflect.EnumNumber(n))
	case field.Kind() == protoreflect.Int32Kind:
		return protoreflect.ValueOf(int32(n))
	case field.Kind() == protoreflect.MessageKind:
		return protoreflect.ValueOf((&runtimeapi.Int64Value{Value: int64(n)}).ProtoReflect())
	}
	return protoreflect.ValueOf(int64(n))
}

func TestCheckSysctl(t *testing.T) {
	const pod, node = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE
	type modes struct{ network, ipc runtimeapi.NamespaceMode }
	for says, names := range map[string]map[string]modes{
		"": {
			"net.ipv4.tcp_syncookies": {pod, pod}, "net/ipv4/conf/eth0.1/arp_filter": {pod, node}, "kernel.shm_rmid_forced": {node, pod},
			"kernel/msgmax": {pod, pod}, "kernel.sem": {pod, pod}, "fs.mqueue.msg_max": {pod, pod},
		},
		"network namespace": {"net.ipv4.tcp_syncookies": {node, pod}, "net/ipv4/tcp_syncookies": {node, pod}},
		"IPC namespace":     {"kernel.shmmax": {pod, node}, "fs.mqueue.msg_max": {pod, node}},
		"change the node":   {"kernel.panic": {}, "vm.overcommit_memory": {}, "fs.file-max": {}, "kernel.shmmax.more": {}, "netx.a": {}, "net": {}},
		"not a name": {
			"": {}, "net.ipv4..tcp_syncookies": {}, "net/../kernel/panic": {}, "net.ipv4.conf/../../../kernel/panic": {}, "net.ipv4.a b": {}, "net.ipv4.a\x00b": {},
		},
	} {
		for name, m := range names {
			config := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: m.network, Ipc: m.ipc},
			}}}
			wantText(t, name, checkSysctl(config, name), says)
		}
	}
}

// wantText: an error that says this, none for "".
func wantText(t *testing.T, of string, err error, says string) {
	harness.Want(t, (err == nil) == (says == ""), "%q: %v, want an error that says %q", of, err, says)
	harness.Want(t, err == nil || strings.Contains(err.Error(), says),
		"%q: %v, want an error that says %q", of, err, says)
}

func TestBitsPerSecond(t *testing.T) {
	for text, want := range map[string]uint64{
		"0": 0, "1000": 1000, "1k": 1000, "1.5M": 1_500_000, "2G": 2_000_000_000, "1T": 1_000_000_000_000, "1P": 1_000_000_000_000_000,
		"1Ki": 1024, "10Mi": 10 << 20, "0.5Gi": 512 << 20, "1e3": 1000,
	} {
		got, err := BitsPerSecond(text)
		harness.Want(t, err == nil && got == want, "BitsPerSecond(%q) = %d, %v, want %d", text, got, err, want)
	}
	for _, text := range []string{"", "k", "1K", "1m", "1ki", "1kk", "1i", "1 k", "-1k", "ten", "NaN", "NaNk", "Inf", "1e400", "9999999999P"} {
		got, err := BitsPerSecond(text)
		harness.Want(t, err != nil, "BitsPerSecond(%q) = %d", text, got)
	}
}

func TestCheckCgroupParent(t *testing.T) {
	for says, parents := range map[string]map[string]bool{ // by the driver, true for systemd
		"":            {"": true, "/kubepods/besteffort": false, "/a..b": false, "/kubepods.slice/kubepods-pod1.slice": true, "kubepods.slice": false},
		"'..'":        {"/kubepods/..": false, "../up": false, "/kubepods/../../up.slice": true},
		"NUL":         {"/a\x00b": false},
		"a character": {"/a:b": false},
		"not a slice": {"/kubepods/pod1": true, "/kubepods.slice/pod1": true},
		"bytes":       {"/" + strings.Repeat("a", longestElement+1): false},
	} {
		for parent, systemd := range parents {
			wantText(t, parent, CgroupParent(parent, systemd), says)
		}
	}
}

const (
	ofPod       = runtimeapi.NamespaceMode_POD
	ofContainer = runtimeapi.NamespaceMode_CONTAINER
	ofNode      = runtimeapi.NamespaceMode_NODE
	ofTarget    = runtimeapi.NamespaceMode_TARGET
)

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
		"all at once": nodetest.GoodPod(),
		"a user namespace in the node's network": {
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "a"},
			Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: ofNode, UsernsOptions: &runtimeapi.UserNamespace{Mode: ofPod, Uids: nodetest.IDs(0, 65536, 65536), Gids: nodetest.IDs(0, 65536, 65536)}},
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

// Pods that the API server and the kubelet accept, and that run with other runtimes, are not refused.
func TestPodAcceptsWhatTheAPIAccepts(t *testing.T) {
	type config = runtimeapi.PodSandboxConfig
	nodeNetwork := func(c *config) { c.Hostname, c.Linux.Sysctls, options(c).Network = "", nil, ofNode }
	hostPort := func(ip string) func(*config) {
		return func(c *config) {
			c.PortMappings = []*runtimeapi.PortMapping{{ContainerPort: 80, HostPort: 8080, HostIp: ip}}
		}
	}
	for _, test := range []struct {
		name   string
		change func(*config)
	}{
		{"options in one", func(c *config) { c.DnsConfig.Options = []string{"ndots:2 timeout:1", "", "a\tb\n"} }},
		{"no port of the node", func(c *config) {
			c.PortMappings = []*runtimeapi.PortMapping{{ContainerPort: 80, HostIp: "localhost"}, {HostIp: "node.test"}}
		}},
		{"network of the node", func(c *config) { hostPort("node.example.test")(c); nodeNetwork(c) }},
		{"bandwidth in the network of the node", func(c *config) { c.Annotations[IngressBandwidth] = "fast"; nodeNetwork(c) }},
		{"leading zeros", hostPort("127.000.000.001")},
		{"brackets", hostPort("[::1]")},
		{"zone", hostPort("fe80::1%eth0")},
		{"mapped", hostPort("::ffff:10.0.0.1")},
		{"domain name", func(c *config) { c.Linux.Sysctls["kernel.domainname"] = "example.test" }},
		{"domain name with slashes", func(c *config) { c.Linux.Sysctls["kernel/domainname"] = "example.test" }},
		{"user namespace", func(c *config) { c.Linux.Sysctls["user.max_user_namespaces"] = "1000" }},
		{"one parameter in two forms", func(c *config) {
			c.Linux.Sysctls["net/ipv4/tcp_syncookies"], c.Linux.Sysctls["net.ipv4.tcp_syncookies"] = "1", "1"
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := nodetest.GoodPod()
			test.change(c)
			harness.Check(t, Pod(c, "runc", goodNode()))
		})
	}
	for text, want := range map[string]string{"127.000.000.001": "127.0.0.1", "[::1]": "::1", "0.0.0.0": "0.0.0.0", "": "", "10.020.0.1": "10.20.0.1"} {
		got, err := HostIP(text)
		harness.Want(t, err == nil && got == want, "%q is %q, %v, want %q", text, got, err, want)
	}
}

// Every malformed field is refused, by its name, and by no other.
//
// cri: LinuxPodSandboxConfig.security_context LinuxSandboxSecurityContext.namespace_options NamespaceOption.ipc
// cri: LinuxPodSandboxConfig.sysctls LinuxSandboxSecurityContext.supplemental_groups_policy NamespaceOption.pid
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
		"linux.security_context.namespace_options.userns_options.uids": {nil, nodetest.IDs(0, 1000, 10, 9, 5000, 10), nodetest.IDs(0, math.MaxUint32-5, 10), manyMappings(maxMappings + 1)},
		"linux.security_context.namespace_options.userns_options.gids": {nil, nodetest.IDs(0, 1000, 10, 100, 991, 10), nodetest.IDs(1, 1000, 10)},
		"linux.security_context.run_as_user":                           {-1, math.MaxUint32}, "linux.security_context.run_as_group": {1 << 33},
		"linux.security_context.supplemental_groups[1]": {-5}, "linux.security_context.supplemental_groups_policy": {2},
		"linux.security_context.seccomp.profile_type": {3}, "linux.security_context.apparmor.profile_type": {-2},
		"linux.security_context.seccomp":  {localhostProfile("profile.json"), localhostProfile("/nowhere/profile.json")},
		"linux.security_context.apparmor": {localhostProfile("web")},
	} {
		for _, value := range values {
			c := nodetest.GoodPod()
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
		{"config.linux.sysctls[kernel.domainname]", func(c *config) {
			c.Hostname, options(c).Network, c.Linux.Sysctls = "", ofNode, map[string]string{"kernel.domainname": "a"}
		}},
		{"config.linux.sysctls[user.max_user_namespaces]", func(c *config) {
			options(c).UsernsOptions = nil
			c.Linux.Sysctls["user.max_user_namespaces"] = "1"
		}},
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
		c := nodetest.GoodPod()
		test.change(c)
		wantRefusal(t, Pod(c, "runc", goodNode()), test.field)
	}
	wantRefusal(t, Pod(nil, "", goodNode()), "config")
	wantRefusal(t, Pod(nodetest.GoodPod(), "kata", goodNode()), "runtime_handler")
	old, confined, systemd, profiled := goodNode(), goodNode(), goodNode(), nodetest.GoodPod()
	old.Machine.UserNamespaces = false // overlays cannot be mapped
	wantRefusal(t, Pod(nodetest.GoodPod(), "", old), namespaceField+"userns_options")
	confined.Machine.AppArmor, security(profiled).Apparmor = true, localhostProfile("web") // which is not loaded
	wantRefusal(t, Pod(profiled, "", confined), securityField+"apparmor")
	systemd.SystemdCgroup = true
	wantRefusal(t, Pod(nodetest.GoodPod(), "", systemd), "config.linux.cgroup_parent")
}

func manyMappings(n uint32) (mappings []*runtimeapi.IDMapping) {
	for i := range n {
		mappings = append(mappings, nodetest.IDs(i, 1000+i, 1)...)
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
