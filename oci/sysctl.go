package oci

import (
	"errors"
	"fmt"
	"slices"
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

// CheckSysctl tells why a kernel parameter cannot be set for this pod: it
// would be set for the whole node, or it belongs to a namespace that the pod
// shares with the node.
func CheckSysctl(config *runtimeapi.PodSandboxConfig, name string) error {
	dotted := SysctlName(name)
	switch {
	case strings.ContainsAny(dotted, "\x00 ") || slices.ContainsFunc(strings.Split(dotted, "."), isNoElement):
		return errors.New("not a name of a kernel parameter")
	case strings.HasPrefix(dotted, "net."):
		if HostNetwork(config) {
			return errors.New("the pod shares the network namespace with the node")
		}
	case strings.HasPrefix(dotted, "fs.mqueue.") || isIPC(dotted):
		if namespaceOptions(config).GetIpc() == runtimeapi.NamespaceMode_NODE {
			return errors.New("the pod shares the IPC namespace with the node")
		}
	default:
		return fmt.Errorf("%s is not a parameter of a namespace, it would change the node", dotted)
	}
	return nil
}

// isNoElement: an element with dots alone (here slashes, see SysctlName) would
// lead out of the directory of the namespace's parameters.
func isNoElement(element string) bool { return strings.Trim(element, "/") == "" }

// isIPC: the kernel parameters of the IPC namespace (ipc_namespaces(7)).
func isIPC(name string) bool {
	switch name {
	case "kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem",
		"kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced":
		return true
	}
	return false
}
