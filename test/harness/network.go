package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
)

// The subnets of every node: each is alone in its network namespace.
const (
	subnet4 = "10.88.0.0/16"
	subnet6 = "fd00:88::/64"
)

// object is a JSON object.
type object = map[string]any

// configure writes the CNI configuration and that of the daemon.
func (n *Node) configure() {
	n.t.Helper()
	if !n.options.noNetwork {
		n.makeBridge()
		n.WriteNetwork()
	}
	toml := fmt.Sprintf("cgroup_driver = \"cgroupfs\"\ncgroup_parent = %q\n%s", n.CgroupParent, n.options.config)
	n.must("writing the daemon's configuration", os.WriteFile(n.configFile(), []byte(toml), 0o600))
}

func (n *Node) configFile() string { return filepath.Join(n.Dir, "config.toml") }

// makeBridge makes the bridge before the first pod does. The plugin keeps it
// for ever, and it is not a pod's leak.
func (n *Node) makeBridge() {
	n.t.Helper()
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.Bridge}}
	n.must("making the bridge", n.inNetns(func() error { return netlink.LinkAdd(bridge) }))
}

// WriteNetwork writes the node's CNI configuration, and returns its path. The
// file comes by rename, as from a careful installer.
func (n *Node) WriteNetwork() string {
	n.t.Helper()
	data, err := json.MarshalIndent(n.networkConfig(), "", "  ")
	n.must("encoding the CNI configuration", err)
	half, path := filepath.Join(n.Dir, "half.conflist"), filepath.Join(n.CNIConf, "10-test.conflist")
	n.must("writing the CNI configuration", os.WriteFile(half, data, 0o644))
	n.must("moving the CNI configuration in", os.Rename(half, path))
	return path
}

func (n *Node) networkConfig() object {
	plugins := []object{n.bridgePlugin()}
	if n.options.portMap {
		plugins = append(plugins, object{"type": "portmap", "capabilities": object{"portMappings": true}})
	}
	return object{"cniVersion": "1.1.0", "name": n.Network, "plugins": plugins}
}

func (n *Node) bridgePlugin() object {
	ranges := [][]object{{{"subnet": subnet4}}}
	routes := []object{{"dst": "0.0.0.0/0"}}
	if n.options.dualStack {
		ranges = append(ranges, []object{{"subnet": subnet6}})
		routes = append(routes, object{"dst": "::/0"})
	}
	return object{
		"type": "bridge", "bridge": n.Bridge,
		"isGateway": true, "ipMasq": true, "hairpinMode": true,
		"ipam": object{
			"type": "host-local", "dataDir": filepath.Dir(n.Addresses),
			"ranges": ranges, "routes": routes,
		},
	}
}
