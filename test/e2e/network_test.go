package e2e

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// serve answers each connection to a port of the pod with a text.
func serve(n *nodetest.Node, id, address, text string) {
	n.ServeInPod(id, "tcp", address, func(conn *net.TCPConn) { fmt.Fprint(conn, text) })
}

// fetch reads what a server sends to the node.
func fetch(n *nodetest.Node, address string) (text string, err error) { return read(n.Dial(address)) }

func read(conn net.Conn, err error) (text string, _ error) {
	if err != nil {
		return "", err
	}
	defer conn.Close()
	data, err := io.ReadAll(conn)
	return string(data), err
}

// A pod is reached at its host ports, of all addresses or of one, and by other pods, until it is stopped; its
// loopback is up.
//
// cri: PortMapping.container_port PodSandboxConfig.port_mappings PortMapping.host_ip
func TestPodsAreReached(t *testing.T) {
	const gateway = "10.88.0.1" // the bridge's, since the first pod
	n := newNode(t, nodetest.PortMap())
	client := pausePID(t, n, n.RunPod(n.PodConfig("client")))
	config := n.PodConfig("web", nodetest.HostPort(8080, 80), nodetest.HostPort(8081, 81), nodetest.HostPort(8082, 80))
	config.PortMappings[2].HostIp = gateway
	// Without a host port it only informs.
	config.PortMappings = append(config.PortMappings, &runtimeapi.PortMapping{ContainerPort: 82})
	id := n.RunPod(config)
	serve(n, id, ":80", "eighty")
	serve(n, id, ":81", "eighty-one")
	serve(n, id, "127.0.0.1:83", "self")
	address := podStatus(t, n, id).Network.Ip + ":80"
	for at, want := range harness.Sorted(map[string]string{gateway + ":8080": "eighty", gateway + ":8081": "eighty-one", gateway + ":8082": "eighty", address: "eighty"}) {
		got, err := fetch(n, at)
		harness.Want(t, got == want, "%s: got %q, error %v", at, got, err)
	}
	for at, pid := range harness.Sorted(map[string]int{address: client, "127.0.0.1:83": pausePID(t, n, id)}) {
		inside(t, pid, "net", func() error { _, err := read(net.Dial("tcp", at)); return err })
	}
	got, err := fetch(n, "127.0.0.1:8082")
	harness.Want(t, err != nil, "another address answers %q", got)
	check(t, stop(t, n, id))
	got, err = fetch(n, gateway+":8080")
	harness.Want(t, err != nil, "the host port answers %q after Stop", got)
}

// The first IPv4 address is the primary one wherever the plugins put it.
//
// cri: PodIP.ip PodSandboxNetworkStatus.additional_ips
func TestDualStack(t *testing.T) {
	n := newNode(t, nodetest.NoNetwork(), nodetest.DualStack())
	bridge := n.BridgePlugin()
	slices.Reverse(bridge["ipam"].(nodetest.Object)["ranges"].([][]nodetest.Object))
	n.WriteConflist("10-test.conflist", bridge)
	id := n.RunPod(n.PodConfig("web"))
	network := podStatus(t, n, id).Network
	wantAddressIn(t, network, "10.88.0.0/16", "fd00:88::/64")
	inside(t, pausePID(t, n, id), "net", func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		onInterface, err := netlink.AddrList(eth0, netlink.FAMILY_ALL)
		for _, address := range []string{network.Ip, network.AdditionalIps[0].Ip} {
			harness.Want(t, slices.ContainsFunc(onInterface, func(a netlink.Addr) bool { return a.IP.String() == address }),
				"%v is not on eth0: %v", address, onInterface)
		}
		return err
	})
	serve(n, id, ":80", "six")
	// Duplicate address detection takes its time.
	harness.Eventually(t, "the pod's IPv6 address answers", func() bool {
		text, _ := fetch(n, "["+network.AdditionalIps[0].Ip+"]:80")
		return text == "six"
	})
	n.Restart()
	again := podStatus(t, n, id).Network
	harness.Want(t, proto.Equal(again, network), "after a restart: %v", again)
	check(t, stop(t, n, id))
	wantAddresses(t, n, 0)
}

func wantAddressIn(t *testing.T, network *runtimeapi.PodSandboxNetworkStatus, subnets ...string) {
	got := []string{network.GetIp()}
	for _, ip := range network.GetAdditionalIps() {
		got = append(got, ip.Ip)
	}
	harness.Need(t, len(got) == len(subnets), "want addresses of %v, got %v", subnets, got)
	for i, subnet := range subnets {
		address, err := netip.ParseAddr(got[i])
		harness.Want(t, err == nil && netip.MustParsePrefix(subnet).Contains(address), "want an address of %s, got %s", subnet, got[i])
	}
}

// cri: NamespaceOption.network
func TestProperty27_HostNetworkWithoutCNI(t *testing.T) {
	n := newNode(t, nodetest.NoNetwork())
	isReady, message := networkReady(t, n)
	harness.Want(t, !isReady && message != "", "the network is ready without a configuration: %q", message)
	wantRefused(t, n, n.PodConfig("needs-cni"))
	id := n.RunPod(n.PodConfig("host", nodetest.HostNetwork()))
	status, info := podStatus(t, n, id), verbose(t, n, id)
	harness.Want(t, status.Network.GetIp() == "", "got %v, network namespace %q", status, info.NetNamespace)
	harness.Want(t, len(status.Network.GetAdditionalIps()) == 0,
		"got %v, network namespace %q", status, info.NetNamespace)
	harness.Want(t, status.Linux.Namespaces.Options.Network == modeNode,
		"got %v, network namespace %q", status, info.NetNamespace)
	harness.Want(t, info.NetNamespace == "", "got %v, network namespace %q", status, info.NetNamespace)
	check(t, remove(t, n, id))
}

// newDefaultNode makes a node with the embedded network. Its addresses, and its bridge unless the network's
// default one is asked for, are those in which the harness looks for leaks, and the node's directory is known
// only to the daemon's second start.
func newDefaultNode(t *testing.T, subnet, keys string) *nodetest.Node {
	n := newNode(t, nodetest.NoNetwork())
	n.Stop()
	dir := filepath.Join(n.Dir, "config.toml.d")
	check(t, os.Mkdir(dir, 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "network.toml"), fmt.Appendf(nil, "[default_network]\nenabled = true\nname = %q\nsubnet = %q\ndata_dir = %q\n%s",
		n.Network, subnet, filepath.Dir(n.Addresses), fmt.Sprintf(keys, n.Bridge)), 0o600))
	n.Start()
	return n
}

const ownBridge = "bridge = %q\n"

func updatePodCIDR(t *testing.T, n *nodetest.Node, cidr string, code codes.Code) {
	_, err := n.Runtime.UpdateRuntimeConfig(harness.Limited(t), &runtimeapi.UpdateRuntimeConfigRequest{
		RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr}},
	})
	nodetest.WantCode(t, err, code)
}

// The embedded network has the subnets of the configuration, or waits for the pod CIDR.
func TestDefaultNetwork(t *testing.T) {
	n := newDefaultNode(t, "10.77.0.0/24,fd00:77::/64", ownBridge)
	becomesReady(t, n, true)
	id := n.RunPod(n.PodConfig("web", nodetest.HostPort(8080, 80)))
	wantAddressIn(t, podStatus(t, n, id).Network, "10.77.0.0/24", "fd00:77::/64")
	serve(n, id, ":80", "default")
	got, err := fetch(n, "10.77.0.1:8080")
	harness.Want(t, got == "default", "the host port: got %q, error %v", got, err)
	inside(t, pausePID(t, n, id), "net", func() error {
		routes, err := netlink.RouteGet(netip.MustParseAddr("192.0.2.1").AsSlice())
		if err == nil && (len(routes) != 1 || routes[0].Gw.String() != "10.77.0.1") {
			return fmt.Errorf("the pod's routes are %v", routes)
		}
		return err
	})
}

// cri: NetworkConfig.pod_cidr RuntimeConfig.network_config UpdateRuntimeConfig UpdateRuntimeConfigRequest.runtime_config
func TestDefaultNetworkWaitsForThePodCIDR(t *testing.T) {
	n := newDefaultNode(t, "", ownBridge)
	isReady, message := networkReady(t, n)
	harness.Want(t, !isReady && message != "", "ready without a subnet: %q", message)
	updatePodCIDR(t, n, "10.66.0.0/24", codes.OK)
	for _, name := range []string{"first", "second"} {
		becomesReady(t, n, true)
		wantAddressIn(t, podStatus(t, n, n.RunPod(n.PodConfig(name))).Network, "10.66.0.0/24")
		n.Crash()
	}
	updatePodCIDR(t, n, "10.66.0.0", codes.InvalidArgument)
	updatePodCIDR(t, n, "10.66.0.0/31", codes.InvalidArgument) // no pod would have an address
	updatePodCIDR(t, n, "", codes.OK)                          // as the kubelet sends at its start: takes nothing away
	becomesReady(t, n, true)
	// It is kept for good; the check for leaks must not find it.
	check(t, os.Remove(filepath.Join(n.Root, "pod-cidr.json")))
}

// The bridge and the table of the embedded network are found once another network is in its place and no pod
// has them, and removed; the table of another node, and the bridge of the node's own network, stay.
func TestCheckFindsWhatTheDefaultNetworkLeaves(t *testing.T) {
	const foreign = "minicri-cni-00000000-masquerade"
	n := newDefaultNode(t, "10.77.0.0/24", "# %q\n")
	id := n.RunPod(n.PodConfig("web"))
	n.WriteNetwork()
	wantProblems := func(when string, want int, flags ...string) {
		found, clean := problems(t, n, flags...)
		harness.Want(t, len(found) == want && clean == (want == 0), "%s: want %d problems, got %v", when, want, found)
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
	nft("add", "table", "inet", foreign)
	wantProblems("nothing is on the bridge", 2)
	wantProblems("repaired", 0, "--fix")
	wantProblems("after that", 0)
	n.RunInNetns(func() error {
		_, err := netlink.LinkByName(n.Bridge)
		return err
	})
	harness.Same(t, "the tables", string(nft("list", "tables", "inet")), "table inet "+foreign+"\n")
	nft("delete", "table", "inet", foreign)
	n.Start()
}

// A handler with a directory of network configurations gives its pods the network of that one: without a network
// there its pods fail, alone and by name; it comes and goes without a restart; and DEL takes what ADD was given.
func TestHandlerWithItsOwnNetwork(t *testing.T) {
	dir := t.TempDir()
	conf, addresses := filepath.Join(dir, "own.d"), filepath.Join(dir, "addresses")
	n := newNode(t, nodetest.Config(fmt.Sprintf("[runtimes.own]\ntype = 'builtin'\ncni_conf_dir = %q", conf)))
	wantProblem := func() {
		holds, said := condition(t, n, "RuntimeHandlerReady/own")
		harness.Want(t, !holds, "Status says %q of the handler", said)
		harness.Want(t, strings.Contains(said, `"own"`), "Status says %q of the handler", said)
		harness.Want(t, strings.Contains(said, conf), "Status says %q of the handler", said)
		isReady, said := networkReady(t, n)
		harness.Want(t, isReady, "the node's network is not ready: %s", said)
	}
	_, err := runBy(t, n, n.PodConfig("early"), "own")
	nodetest.WantCode(t, err, codes.Unavailable, conf)
	wantProblem()
	// The condition that the daemon says, and what the check sees itself.
	found, clean := problems(t, n)
	harness.Want(t, !clean && len(found) > 0, "minicri check finds nothing")
	for _, problem := range found {
		harness.Want(t, strings.Contains(problem.Message, conf), "minicri check finds %v", problem)
	}

	check(t, os.Mkdir(conf, 0o755))
	check(t, os.WriteFile(filepath.Join(conf, "10-own.conflist"), fmt.Appendf(nil, `{"cniVersion": "1.0.0", "name": "own", "plugins": [
		{"type": "bridge", "bridge": %q, "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.89.0.0/16"}]]}}
	]}`, n.Bridge, addresses), 0o644))
	harness.Eventually(t, "the handler's network is there", func() bool { holds, _ := condition(t, n, "RuntimeHandlerReady/own"); return holds })
	own, err := runBy(t, n, n.PodConfig("own"), "own")
	check(t, err)
	other := n.RunPod(n.PodConfig("other"))
	for id, prefix := range harness.Sorted(map[string]string{own: "10.89.", other: "10.88."}) {
		got := podStatus(t, n, id).Network.GetIp()
		harness.Want(t, strings.HasPrefix(got, prefix), "the pod has the address %q, want %s...", got, prefix)
	}
	wantClean(t, n)

	n.Kill()
	check(t, os.RemoveAll(conf))
	n.Start()
	wantProblem()
	n.RemovePod(own)
	left := harness.Glob(t, addresses, "own", "10.89.*")
	harness.Want(t, len(left) == 0, "DEL has left %v", left)
	n.RemovePod(other)
}
