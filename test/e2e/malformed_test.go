package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Each malformed request is refused with the name of its field; that nothing
// stays is what the node's check is for.
//
// cri: LinuxPodSandboxConfig.sysctls LinuxSandboxSecurityContext.supplemental_groups_policy
// cri: NamespaceOption.pid
func TestMalformedRequests(t *testing.T) {
	n := newNode(t)
	type config = runtimeapi.PodSandboxConfig
	for field, change := range map[string]func(*config){
		"metadata":                   func(c *config) { c.Metadata = nil },
		"metadata.name":              func(c *config) { c.Metadata.Name = "" },
		"metadata.name ":             func(c *config) { c.Metadata.Name = "a/../b" },
		"metadata.namespace":         func(c *config) { c.Metadata.Namespace = "a\x00b" },
		"metadata.uid":               func(c *config) { c.Metadata.Uid = "a;b=c" },
		"hostname":                   func(c *config) { c.Hostname = strings.Repeat("h", 65) },
		"hostname ":                  func(c *config) { c.Hostname = "a b" },
		"log_directory":              func(c *config) { c.LogDirectory = "relative/path" },
		"log_directory ":             func(c *config) { c.LogDirectory = n.Logs + "/../../x" },
		"dns_config.servers[0]":      func(c *config) { c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"1.1.1.1\noptions x"}} },
		"port_mappings[0].host_port": func(c *config) { c.PortMappings = []*runtimeapi.PortMapping{{HostPort: 70000, ContainerPort: 80}} },
		"port_mappings[0].host_ip": func(c *config) {
			c.PortMappings = []*runtimeapi.PortMapping{{HostPort: 80, ContainerPort: 80, HostIp: "host"}}
		},
		"port_mappings[0].protocol": func(c *config) {
			c.PortMappings = []*runtimeapi.PortMapping{{HostPort: 80, ContainerPort: 80, Protocol: 9}}
		},
		"annotations":                func(c *config) { c.Annotations = map[string]string{"kubernetes.io/ingress-bandwidth": "fast"} },
		"cgroup_parent":              func(c *config) { c.Linux.CgroupParent = "/a/../b" },
		"namespace_options.network":  func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Network = 9 },
		"namespace_options.network ": func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Network = modeContainer },
		"namespace_options.pid":      func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET },
		"namespace_options.ipc":      func(c *config) { c.Linux.SecurityContext.NamespaceOptions.Ipc = -1 },
		"run_as_user":                func(c *config) { c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: -1} },
		"supplemental_groups[0]":     func(c *config) { c.Linux.SecurityContext.SupplementalGroups = []int64{1 << 40} },
		"supplemental_groups_policy": func(c *config) { c.Linux.SecurityContext.SupplementalGroupsPolicy = 7 },
		"seccomp.profile_type":       func(c *config) { c.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{ProfileType: 7} },
		"sysctls[kernel.panic]":      func(c *config) { c.Linux.Sysctls = map[string]string{"kernel.panic": "1"} },
		"userns_options.mode": func(c *config) {
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: modeContainer}
		},
	} {
		bad := n.PodConfig("bad")
		change(bad)
		_, err := run(t, n, bad)
		wantCode(t, err, codes.InvalidArgument)
		if err != nil && !strings.Contains(err.Error(), strings.TrimSpace(field)) {
			t.Errorf("%s: the error does not name it: %v", field, err)
		}
	}
	_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{})
	wantCode(t, err, codes.InvalidArgument)
	_, err = n.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{})
	wantCode(t, err, codes.InvalidArgument)
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("listed: %v", pods)
	}
	// The daemon is as good as before.
	n.RunPod(n.PodConfig("good"))
}

// A pod in quarantine is no orphan where the quarantine cannot be read: the daemon does
// not start, and check --fix removes nothing.
func TestQuarantineThatCannotBeRead(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	pid := pausePID(t, n, id)
	record := filepath.Join(n.Root, "sandboxes", id+".json")
	whole, err := os.ReadFile(record)
	check(t, err)
	n.Kill()
	check(t, os.WriteFile(record, []byte("nonsense"), 0o600))
	n.Start()
	n.Kill()
	dir := filepath.Join(n.Root, "sandboxes", "quarantine")
	check(t, os.Rename(dir, dir+".away"))
	check(t, os.Symlink("quarantine", dir)) // ELOOP
	if err := n.TryStart(); err == nil || !strings.Contains(n.Log(), "quarantine") {
		t.Errorf("the daemon started: %v", err)
	}
	if output, err := n.RunCommand("check", "--fix"); err == nil || !strings.Contains(output, "quarantine") {
		t.Errorf("check: %v\n%s", err, output)
	}
	if !alive(pid) || len(addresses(t, n)) != 1 {
		t.Errorf("pause lives: %v, addresses %v", alive(pid), addresses(t, n))
	}
	check(t, os.Remove(dir))
	check(t, os.RemoveAll(dir+".away"))
	check(t, os.WriteFile(record, whole, 0o600))
	n.Start()
	if !ready(t, n, id) {
		t.Error("the pod is not Ready")
	}
}
