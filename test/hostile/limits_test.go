//go:build vm

package hostile

import (
	"os/exec"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// Root in a container, all capabilities dropped, takes what the kernel counts for root of the node and of containers
// together, or for the node: keys, terminals, namespaces, and with cgroup_writable cgroups. (As many watches of epoll as
// that takes are taken and given back too slowly in User-mode Linux.)
//
// attack: denial of service: a container takes all keys, terminals, namespaces or (if they are writable) cgroups that the kernel allows root, with minicri's sysctl.d in force
// held: other pods are not affected; the container gets 1024 terminals and cgroups
func TestLimitsOfAUser(t *testing.T) {
	out, err := exec.Command("/usr/lib/systemd/systemd-sysctl", "60-minicri.conf").CombinedOutput()
	harness.Need(t, err == nil, "systemd-sysctl: %v: %s", err, out)
	for what, count := range harness.Sorted(map[string]struct{ asked, given string }{ // asked: more than the kernel has for root
		"keys": {"10000", ""}, "terminals": {"10000", "1024"}, "namespaces": {"40000", "40000"}, "cgroups": {"2000", "1024"},
	}) {
		t.Run(what, func(t *testing.T) {
			n := newAttackedNode(t, nodetest.Config("cgroup_writable = true"))
			p := newTenant(t, n, "attacker")
			besides(t, n, func(others func()) {
				id := p.run("app", ofAttacker("take", what, count.asked), powerless(runtimeapi.SecurityProfile_Unconfined))
				p.awaitLog("app", "has "+count.given)
				others()
				for range 2 {
					later := newTenant(t, n, "later")
					later.run("app", func(c *runtimeapi.ContainerConfig) { c.Tty = true })
					n.RemovePod(later.id)
				}
				p.end(id)
			})
		})
	}
}
