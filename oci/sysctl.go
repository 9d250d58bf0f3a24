package oci

import (
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sandboxSysctls sets the kernel parameters of the pod's namespaces. Unless
// the pod says otherwise, every user of it may bind low ports and send pings,
// as in Docker and containerd; not in a user namespace of its own, where the
// group range could not be written, nor in the node's network.
func sandboxSysctls(s *Sandbox, spec *specs.Spec) error {
	spec.Linux.Sysctl = make(map[string]string)
	if s.NetNS != "" {
		spec.Linux.Sysctl["net.ipv4.ip_unprivileged_port_start"] = "0"
		if s.UserNS == "" {
			spec.Linux.Sysctl["net.ipv4.ping_group_range"] = "0 2147483647"
		}
	}
	for name, value := range s.Defaults.Sysctls {
		if OwnsSysctl(s.Config, name) {
			spec.Linux.Sysctl[SysctlName(name)] = value
		}
	}
	for name, value := range s.Config.GetLinux().GetSysctls() {
		spec.Linux.Sysctl[SysctlName(name)] = value
	}
	return nil
}

// SysctlName is the name with dots. A name may be written with slashes, and a
// dot is then part of an element (sysctl.d(5)): net/ipv4/conf/eth0.1/arp.
func SysctlName(name string) string {
	first := strings.IndexAny(name, "./")
	if first < 0 || name[first] == '.' {
		return name
	}
	swap := strings.NewReplacer(".", "/", "/", ".")
	return swap.Replace(name)
}

// OwnsSysctl reports whether a kernel parameter belongs to a namespace that the
// pod has for itself.
func OwnsSysctl(config *runtimeapi.PodSandboxConfig, name string) bool {
	switch SysctlNamespace(name) {
	case specs.NetworkNamespace:
		return !HostNetwork(config)
	case specs.IPCNamespace:
		return namespaceOptions(config).GetIpc() != runtimeapi.NamespaceMode_NODE
	default:
		return false
	}
}

// SysctlNamespace is the kind of namespace that a kernel parameter belongs to,
// "" if it is one of the node.
func SysctlNamespace(name string) specs.LinuxNamespaceType {
	dotted := SysctlName(name)
	switch {
	case strings.HasPrefix(dotted, "net."):
		return specs.NetworkNamespace
	case strings.HasPrefix(dotted, "fs.mqueue.") || isIPC(dotted):
		return specs.IPCNamespace
	default:
		return ""
	}
}

// isIPC: the kernel parameters of the IPC namespace (ipc_namespaces(7)).
func isIPC(name string) bool {
	switch name {
	case "kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem",
		"kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced":
		return true
	}
	return false
}
