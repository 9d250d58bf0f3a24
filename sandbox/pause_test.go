package sandbox

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestNeedsInterfaces(t *testing.T) {
	for name, want := range map[string]bool{
		"":                                    false,
		"kernel.shmmax":                       false,
		"net.core.somaxconn":                  false,
		"net.ipv4.tcp_syncookies":             false,
		"net.ipv4.ip_unprivileged_port_start": false,
		"net.ipv4.configure":                  false,
		"net.ipv4.conf.eth0.arp_filter":       true,
		"net.ipv4.conf.all.forwarding":        true,
		"net.ipv6.conf.default.accept_ra":     true,
		"net/ipv6/conf/eth0/accept_ra":        true,
		"net.ipv4.neigh.eth0.gc_stale_time":   true,
		"fs.net.conf.x":                       false,
	} {
		config := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{Sysctls: map[string]string{name: "1"}}}
		if got := needsInterfaces(config); got != want {
			t.Errorf("needsInterfaces(%q) = %v, want %v", name, got, want)
		}
	}
	if needsInterfaces(&runtimeapi.PodSandboxConfig{}) {
		t.Error("a pod without sysctls")
	}
}
