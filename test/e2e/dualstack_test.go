package e2e

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// cri: PodIP.ip PodSandboxNetworkStatus.additional_ips
func TestDualStack(t *testing.T) {
	n := newNode(t, harness.DualStack(), harness.PortMap())
	id := n.RunPod(n.PodConfig("web", harness.HostPort(8080, 80)))
	status := podStatus(t, n, id)
	if len(status.Network.AdditionalIps) != 1 {
		t.Fatalf("got %v", status.Network)
	}
	primary, additional := netip.MustParseAddr(status.Network.Ip), netip.MustParseAddr(status.Network.AdditionalIps[0].Ip)
	if !primary.Is4() || !additional.Is6() {
		t.Errorf("primary %v, additional %v", primary, additional)
	}
	onInterface := interfaceAddresses(t, pausePID(t, n, id))
	for _, address := range []netip.Addr{primary, additional} {
		if !slices.Contains(onInterface, address) {
			t.Errorf("%v is not on eth0: %v", address, onInterface)
		}
	}
	serve(t, n, id, ":80", "six")
	// Duplicate address detection takes its time.
	eventually(t, "the pod's IPv6 address answers", patience, func() bool {
		text, err := fetch(n, net.JoinHostPort(additional.String(), "80"))
		return err == nil && text == "six"
	})
	n.Restart()
	if again := podStatus(t, n, id); again.Network.Ip != status.Network.Ip || again.Network.AdditionalIps[0].Ip != status.Network.AdditionalIps[0].Ip {
		t.Errorf("after a restart: %v", again.Network)
	}
	check(t, stop(t, n, id))
	if held := addresses(t, n); len(held) != 0 {
		t.Errorf("addresses stay: %v", held)
	}
}

func interfaceAddresses(t *testing.T, pid int) (found []netip.Addr) {
	t.Helper()
	inNetwork(t, pid, func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		addresses, err := netlink.AddrList(eth0, netlink.FAMILY_ALL)
		for _, a := range addresses {
			if address, ok := netip.AddrFromSlice(a.IP); ok {
				found = append(found, address.Unmap())
			}
		}
		return err
	})
	return found
}

// The first IPv4 address is the primary one wherever the plugins put it.
func TestPrimaryAddressIsIPv4(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	bridge := n.BridgePlugin()
	bridge["ipam"].(harness.Object)["ranges"] = []any{
		[]harness.Object{{"subnet": "fd00:99::/64"}}, []harness.Object{{"subnet": "10.99.0.0/24"}},
	}
	bridge["ipam"].(harness.Object)["routes"] = []harness.Object{}
	n.WriteConflist("10-test.conflist", bridge)
	network := podStatus(t, n, n.RunPod(n.PodConfig("web"))).Network
	got := []string{network.Ip}
	for _, ip := range network.AdditionalIps {
		got = append(got, ip.Ip)
	}
	if !slices.Equal(got, []string{"10.99.0.2", "fd00:99::2"}) {
		t.Errorf("got %v", got)
	}
}

// cri: NamespaceOption.network
func TestProperty27_HostNetworkWithoutCNI(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	if isReady, message := networkReady(t, n); isReady || message == "" {
		t.Errorf("the network is ready without a configuration: %q", message)
	}
	if _, err := run(t, n, n.PodConfig("needs-cni")); err == nil {
		t.Error("a pod with a network of its own ran")
	}
	id := n.RunPod(n.PodConfig("host", harness.HostNetwork()))
	status := podStatus(t, n, id)
	if status.Network.GetIp() != "" || len(status.Network.GetAdditionalIps()) != 0 || status.Linux.Namespaces.Options.Network != runtimeapi.NamespaceMode_NODE {
		t.Errorf("got %v", status)
	}
	if info := verbose(t, n, id); info.NetNamespace != "" {
		t.Errorf("it has a network namespace: %s", info.NetNamespace)
	}
	check(t, remove(t, n, id))
}
