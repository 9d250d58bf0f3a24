package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxSysctls(t *testing.T) {
	golden(t, "sysctl", sandboxSysctls, func(s *specs.Spec) any { return s.Linux.Sysctl })
}

func TestSysctlName(t *testing.T) {
	for _, test := range []struct{ name, want string }{
		{"kernel.shmmax", "kernel.shmmax"},
		{"kernel/shmmax", "kernel.shmmax"},
		{"net/ipv4/conf/eth0.100/arp_filter", "net.ipv4.conf.eth0/100.arp_filter"},
		{"net.ipv4.conf.eth0/100.arp_filter", "net.ipv4.conf.eth0/100.arp_filter"},
		{"net", "net"},
		{"", ""},
		{"/net", ".net"},
	} {
		if got := SysctlName(test.name); got != test.want {
			t.Errorf("SysctlName(%q) = %q, want %q", test.name, got, test.want)
		}
	}
}
