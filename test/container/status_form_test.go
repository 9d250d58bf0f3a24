package container

import (
	"net/netip"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// What the kubelet takes for granted of every status, in every state and over a
// restart: the path of the log is absolute and never empty, the network mode is the
// one that was asked for, and addresses can be parsed; there are some where the pod
// is Ready in a network of its own, and none else.
func TestProperty31_FormOfEveryStatus(t *testing.T) {
	n := newNode(t, harness.DualStack())
	noLogs := func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = "" }
	pods := []*pod{runPod(t, n, "own"), runPod(t, n, "host", harness.HostNetwork()), runPod(t, n, "no-logs", noLogs)}
	var containers []string
	for _, p := range pods {
		deep := func(c *runtimeapi.ContainerConfig) { c.LogPath = "deep/app.log" }
		containers = append(containers, p.run("lives", forever), p.run("ended", "exit 1"), p.create(shell("waits", "true")), p.create(shell("none", "true", noLog)), p.create(shell("deep", "true", deep)))
		p.awaitExit(containers[len(containers)-4])
	}
	look := func() {
		t.Helper()
		for _, id := range containers {
			if path := pods[0].status(id).LogPath; !filepath.IsAbs(path) {
				t.Errorf("the log of %v is at %q", pods[0].status(id).Metadata, path)
			}
		}
		for _, p := range pods {
			answer, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.id})
			check(t, err)
			s := answer.Status
			mode := p.config.Linux.SecurityContext.NamespaceOptions.Network
			if got := s.GetLinux().GetNamespaces().GetOptions().GetNetwork(); got != mode {
				t.Errorf("pod %s: network mode %v, want %v", s.Metadata.Name, got, mode)
			}
			all := []string{s.GetNetwork().GetIp()}
			for _, ip := range s.GetNetwork().GetAdditionalIps() {
				all = append(all, ip.Ip)
			}
			if mode == runtimeapi.NamespaceMode_NODE || s.State != runtimeapi.PodSandboxState_SANDBOX_READY {
				if len(all) != 1 || all[0] != "" {
					t.Errorf("pod %s has the addresses %q", s.Metadata.Name, all)
				}
				continue
			}
			if len(all) != 2 {
				t.Errorf("pod %s has the addresses %q, want two", s.Metadata.Name, all)
			}
			for _, ip := range all {
				if _, err := netip.ParseAddr(ip); err != nil {
					t.Errorf("pod %s: %v", s.Metadata.Name, err)
				}
			}
		}
	}
	look()
	n.Restart()
	look()
	for _, p := range pods {
		check(t, p.stopPod())
	}
	look()
}
