package oci

import (
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
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
