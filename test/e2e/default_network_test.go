package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// newDefaultNode makes a node with the embedded network. Its bridge and its
// addresses are those in which the harness looks for leaks, and the node's
// directory is known only to the daemon's second start.
func newDefaultNode(t *testing.T, subnet string) *harness.Node {
	t.Helper()
	n := newNode(t, harness.NoNetwork())
	n.Stop()
	dir := filepath.Join(n.Dir, "config.toml.d")
	check(t, os.Mkdir(dir, 0o755))
	text := fmt.Sprintf("[default_network]\nenabled = true\nname = %q\nbridge = %q\nsubnet = %q\ndata_dir = %q\n",
		n.Network, n.Bridge, subnet, filepath.Dir(n.Addresses))
	check(t, os.WriteFile(filepath.Join(dir, "network.toml"), []byte(text), 0o600))
	n.Start()
	return n
}

func wantAddressIn(t *testing.T, status *runtimeapi.PodSandboxStatus, subnets ...string) {
	t.Helper()
	got := []string{status.Network.Ip}
	for _, ip := range status.Network.AdditionalIps {
		got = append(got, ip.Ip)
	}
	if len(got) != len(subnets) {
		t.Fatalf("want addresses of %v, got %v", subnets, got)
	}
	for i, subnet := range subnets {
		address, err := netip.ParseAddr(got[i])
		if err != nil || !netip.MustParsePrefix(subnet).Contains(address) {
			t.Errorf("want an address of %s, got %s", subnet, got[i])
		}
	}
}

func TestDefaultNetworkWithASubnetOfTheConfiguration(t *testing.T) {
	n := newDefaultNode(t, "10.77.0.0/24,fd00:77::/64")
	if isReady, message := networkReady(t, n); !isReady {
		t.Fatalf("not ready: %s", message)
	}
	id := n.RunPod(n.PodConfig("web", harness.HostPort(8080, 80)))
	wantAddressIn(t, podStatus(t, n, id), "10.77.0.0/24", "fd00:77::/64")
	serve(t, n, id, ":80", "default")
	if got, err := fetch(n, "10.77.0.1:8080"); got != "default" {
		t.Errorf("the host port: got %q, error %v", got, err)
	}
	inNetwork(t, pausePID(t, n, id), func() error {
		routes, err := netlink.RouteGet(netip.MustParseAddr("192.0.2.1").AsSlice())
		if err == nil && (len(routes) != 1 || routes[0].Gw.String() != "10.77.0.1") {
			return fmt.Errorf("the pod's routes are %v", routes)
		}
		return err
	})
}

// cri: NetworkConfig.pod_cidr RuntimeConfig.network_config UpdateRuntimeConfig
// cri: UpdateRuntimeConfigRequest.runtime_config
func TestDefaultNetworkWaitsForThePodCIDR(t *testing.T) {
	n := newDefaultNode(t, "")
	if isReady, message := networkReady(t, n); isReady || message == "" {
		t.Errorf("ready without a subnet: %q", message)
	}
	_, err := n.Runtime.UpdateRuntimeConfig(limited(t), podCIDR("10.66.0.0/24"))
	check(t, err)
	becomesReady(t, n, true)
	first := n.RunPod(n.PodConfig("first"))
	wantAddressIn(t, podStatus(t, n, first), "10.66.0.0/24")
	n.Kill()
	n.Start()
	becomesReady(t, n, true)
	wantAddressIn(t, podStatus(t, n, n.RunPod(n.PodConfig("second"))), "10.66.0.0/24")
	// An empty one, as the kubelet sends at its start, takes nothing away.
	_, err = n.Runtime.UpdateRuntimeConfig(limited(t), podCIDR(""))
	check(t, err)
	_, err = n.Runtime.UpdateRuntimeConfig(limited(t), podCIDR("10.66.0.0"))
	wantCode(t, err, codes.InvalidArgument)
	if isReady, message := networkReady(t, n); !isReady {
		t.Errorf("not ready: %s", message)
	}
	// It is kept for good; the check for leaks must not find it.
	check(t, os.Remove(filepath.Join(n.Root, "pod-cidr.json")))
}

// The bridge and the table of the embedded network are found once another network is in
// its place and no pod has them, and removed; the table of another node, and the bridge
// of the node's own network, stay.
func TestCheckFindsWhatTheDefaultNetworkLeaves(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	n.Stop()
	dir := filepath.Join(n.Dir, "config.toml.d")
	check(t, os.Mkdir(dir, 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "network.toml"), fmt.Appendf(nil, "[default_network]\nenabled = true\nname = %q\nsubnet = \"10.77.0.0/24\"\ndata_dir = %q\n",
		n.Network, filepath.Dir(n.Addresses)), 0o600))
	n.Start()
	id := n.RunPod(n.PodConfig("web"))
	n.WriteNetwork()
	wantProblems := func(when string, want int, flags ...string) {
		t.Helper()
		if found, clean := problems(t, n, flags...); len(found) != want || clean != (want == 0) {
			t.Errorf("%s: want %d problems, got %v", when, want, found)
		}
	}
	wantProblems("a pod is on the bridge", 0)
	// The daemon that takes the last pod away has no time to remove the table.
	table := filepath.Join(n.Dir, "table")
	nft := func(arguments ...string) (out []byte) {
		n.RunInNetns(func() (err error) {
			out, err = exec.CommandContext(t.Context(), "nft", arguments...).Output()
			return err
		})
		return out
	}
	check(t, os.WriteFile(table, nft("list", "ruleset"), 0o600))
	n.RemovePod(id)
	n.Stop()
	nft("flush", "ruleset")
	nft("-f", table)
	nft("add", "table", "inet", "minicri-cni-00000000-masquerade")
	wantProblems("nothing is on the bridge", 2)
	wantProblems("repaired", 0, "--fix")
	wantProblems("after that", 0)
	n.RunInNetns(func() error {
		_, err := netlink.LinkByName(n.Bridge)
		return err
	})
	if left := string(nft("list", "tables", "inet")); left != "table inet minicri-cni-00000000-masquerade\n" {
		t.Errorf("the tables are %q", left)
	}
	nft("delete", "table", "inet", "minicri-cni-00000000-masquerade")
	n.Start()
}
