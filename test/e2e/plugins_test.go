package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// pluginCase is a chain of real plugins and the part of the kernel that it needs.
type pluginCase struct {
	name    string
	plugins []nodetest.Object
	needs   netlink.Link // nil for a chain that every kernel can run
	subnet  string       // has the pod's address
	pod     func(*runtimeapi.PodSandboxConfig)
	inPod   func() error // runs in the pod's network namespace
	dial    string       // from the node; the default is port 80 of the pod
}

// The real plugins make a pod that the node reaches, and leave nothing. If the kernel has no such link, the error names
// the plugin and the module to load.
func TestRealPlugins(t *testing.T) {
	n := newNode(t, nodetest.NoNetwork(), nodetest.Config(fast))
	linkTestPlugins(t, n)
	// Pods get interfaces on the near end of the first cable, and the near end of the second one itself.
	n.RunInNetns(func() error {
		return errors.Join(cable("near0", "far0", "10.77.0.1/24"), cable("near1", "far1", "10.78.0.1/24"))
	})
	t.Cleanup(func() {
		n.RunInNetns(func() error { return errors.Join(removeLink("near0"), removeLink("near1")) })
	})
	leases := serveDHCP(t, n)
	static := func(address string) nodetest.Object {
		return nodetest.Object{"type": "static", "addresses": []nodetest.Object{{"address": address}}}
	}
	on := func(plugin string, fields nodetest.Object) []nodetest.Object {
		all := nodetest.Object{"type": plugin, "ipam": static("10.77.0.9/24")}
		for key, value := range fields {
			all[key] = value
		}
		return []nodetest.Object{all}
	}
	chained := func(plugins ...nodetest.Object) []nodetest.Object {
		return append([]nodetest.Object{n.BridgePlugin()}, plugins...)
	}
	near0 := netlink.LinkAttrs{Name: "probe0", ParentIndex: linkIndex(t, n, "near0")}
	for _, c := range []pluginCase{
		{name: "bridge, host-local", plugins: chained(), subnet: "10.88.0.0/16"},
		{name: "ptp, host-local", plugins: []nodetest.Object{{
			"type": "ptp", "ipMasq": true, "ipam": nodetest.Object{
				"type": "host-local", "subnet": "10.79.0.0/24", "dataDir": filepath.Dir(n.Addresses),
			},
		}}, subnet: "10.79.0.0/24"},
		{
			name: "macvlan, static", plugins: on("macvlan", nodetest.Object{"master": "near0", "mode": "bridge"}),
			needs: &netlink.Macvlan{LinkAttrs: near0}, subnet: "10.77.0.0/24",
		},
		{
			name: "macvlan, dhcp", plugins: on("macvlan", nodetest.Object{"master": "near0", "ipam": leases}),
			needs: &netlink.Macvlan{LinkAttrs: near0}, subnet: "10.77.0.0/24",
		},
		{
			name: "ipvlan", plugins: on("ipvlan", nodetest.Object{"master": "near0"}),
			needs: &netlink.IPVlan{LinkAttrs: near0}, subnet: "10.77.0.0/24",
		},
		{
			name: "vlan", plugins: on("vlan", nodetest.Object{"master": "near0", "vlanId": 5}),
			needs: &netlink.Vlan{LinkAttrs: near0, VlanId: 5}, subnet: "10.77.0.0/24", dial: "none",
		},
		{
			name: "dummy", plugins: on("dummy", nil),
			needs: &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}}, subnet: "10.77.0.0/24", dial: "none",
		},
		{
			name: "host-device", plugins: []nodetest.Object{
				{"type": "host-device", "device": "near1", "ipam": static("10.78.0.9/24")},
			},
			subnet: "10.78.0.0/24",
		},
		{
			name: "portmap", plugins: chained(nodetest.Object{
				"type": "portmap", "capabilities": nodetest.Object{"portMappings": true}, "snat": true,
			}),
			subnet: "10.88.0.0/16", pod: nodetest.HostPort(8080, 80), dial: "10.88.0.1:8080",
		},
		{
			name: "bandwidth", plugins: chained(nodetest.Object{
				"type": "bandwidth", "capabilities": nodetest.Object{"bandwidth": true},
			}),
			subnet: "10.88.0.0/16", pod: func(config *runtimeapi.PodSandboxConfig) {
				config.Annotations = map[string]string{"kubernetes.io/ingress-bandwidth": "10M"}
			},
		},
		{
			name: "tuning", plugins: chained(nodetest.Object{
				"type": "tuning", "sysctl": nodetest.Object{"net.core.somaxconn": "500"}, "mtu": 1400,
			}),
			subnet: "10.88.0.0/16", inPod: func() error {
				link, err := netlink.LinkByName("eth0")
				if err == nil && link.Attrs().MTU != 1400 {
					err = fmt.Errorf("the MTU is %d", link.Attrs().MTU)
				}
				return err
			},
		},
		{
			name: "firewall", plugins: chained(nodetest.Object{"type": "firewall", "backend": "iptables"}),
			subnet: "10.88.0.0/16",
		},
		{name: "sbr", plugins: chained(nodetest.Object{"type": "sbr"}), subnet: "10.88.0.0/16", inPod: func() error {
			rules, err := netlink.RuleList(netlink.FAMILY_V4)
			if err == nil && len(rules) < 4 {
				err = fmt.Errorf("no rule by source: %v", rules)
			}
			return err
		}},
		{
			name: "vrf", plugins: chained(nodetest.Object{"type": "vrf", "vrfname": "blue"}),
			needs:  &netlink.Vrf{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}, Table: 10},
			subnet: "10.88.0.0/16", dial: "none",
		},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, n) })
	}
}

func (c *pluginCase) test(t *testing.T, n *nodetest.Node) {
	before := n.Look()
	n.WriteConflist("10-test.conflist", c.plugins...)
	config := n.PodConfig("web")
	if c.pod != nil {
		c.pod(config)
	}
	id, err := run(t, n, config)
	if problem := missing(n, c.needs); problem != nil {
		plugin, _, _ := strings.Cut(c.name, ",")
		harness.WantError(t, err, "plugin "+plugin+":", problem.Error(), "modprobe ")
		harness.Same(t, "left behind", n.Differences(before), nil)
		return
	}
	check(t, err)
	address := podStatus(t, n, id).Network.GetIp()
	ip, err := netip.ParseAddr(address)
	check(t, err)
	harness.Want(t, netip.MustParsePrefix(c.subnet).Contains(ip), "want an address of %s, got %q", c.subnet, address)
	if c.inPod != nil {
		inside(t, pausePID(t, n, id), "net", c.inPod)
	}
	at := c.dial
	if at == "" {
		at = address + ":80"
	}
	if at != "none" {
		serve(n, id, ":80", c.name)
		got, err := fetch(n, at)
		harness.Want(t, got == c.name, "%s: got %q, error %v", at, got, err)
	}
	check(t, stop(t, n, id))
	check(t, remove(t, n, id))
	harness.Same(t, "left behind", n.Differences(before), nil)
}

// missing returns why the kernel cannot make such a link in the node's network.
func missing(n *nodetest.Node, link netlink.Link) (problem error) {
	if link == nil {
		return nil
	}
	n.RunInNetns(func() error {
		if problem = netlink.LinkAdd(link); problem != nil {
			return nil
		}
		return netlink.LinkDel(link)
	})
	return problem
}

// linkTestPlugins makes the plugins that minicri does not install available to a node.
func linkTestPlugins(t *testing.T, n *nodetest.Node) {
	dir := filepath.Join(n.Binaries(), "networks")
	plugins, err := os.ReadDir(dir)
	harness.Need(t, err == nil, "plugins for tests are absent, run 'make bin/networks/.built': %v", err)
	for _, plugin := range plugins {
		check(t, os.Symlink(filepath.Join(dir, plugin.Name()), filepath.Join(n.Plugins, plugin.Name())))
	}
}

// cable makes two connected interfaces, the far one with an address.
func cable(near, far, address string) error {
	link := netlink.NewVeth(netlink.LinkAttrs{Name: near})
	link.PeerName = far
	ip, err := netlink.ParseAddr(address)
	if err != nil {
		return err
	}
	if err := netlink.LinkAdd(link); err != nil {
		return err
	}
	peer, err := netlink.LinkByName(far)
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(peer, ip), netlink.LinkSetUp(peer), netlink.LinkSetUp(link))
}

func removeLink(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkDel(link)
}

func linkIndex(t *testing.T, n *nodetest.Node, name string) (index int) {
	n.RunInNetns(func() error {
		link, err := netlink.LinkByName(name)
		if err == nil {
			index = link.Attrs().Index
		}
		return err
	})
	return index
}

// serveDHCP starts a DHCP server on the first cable and the daemon of the dhcp plugin, and returns its configuration.
func serveDHCP(t *testing.T, n *nodetest.Node) nodetest.Object {
	socket, conf := filepath.Join(n.Dir, "dhcp.sock"), filepath.Join(n.Dir, "udhcpd.conf")
	lines := fmt.Sprintf("start 10.77.0.100\nend 10.77.0.120\ninterface far0\n"+
		"option subnet 255.255.255.0\noption lease 600\nlease_file %s/leases\npidfile %[1]s/udhcpd.pid\n", n.Dir)
	check(t, os.WriteFile(conf, []byte(lines), 0o600))
	check(t, os.WriteFile(filepath.Join(n.Dir, "leases"), nil, 0o600))
	for _, line := range [][]string{
		{"/bin/busybox", "udhcpd", "-f", conf}, {filepath.Join(n.Plugins, "dhcp"), "daemon", "-socketpath", socket},
	} {
		command := exec.Command(line[0], line[1:]...)
		command.Env = []string{"PATH=/usr/bin:/bin"}
		n.RunInNetns(command.Start)
		t.Cleanup(func() {
			check(t, command.Process.Kill())
			_ = command.Wait() // reports the kill
		})
	}
	harness.Eventually(t, "the dhcp daemon listens", func() bool {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return nodetest.Object{"type": "dhcp", "daemonSocketPath": socket}
}
