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

// Object is a JSON object.
type Object = map[string]any

// configure writes the CNI configuration and that of the daemon.
func (n *Node) configure() {
	n.t.Helper()
	n.makeBridge()
	if !n.options.noNetwork {
		n.WriteNetwork()
	}
	toml := fmt.Sprintf("cgroup_driver = %q\ncgroup_parent = %q\n%s", CgroupDriver(), n.CgroupParent, n.options.config+n.options.runtimes)
	n.must("writing the daemon's configuration", os.WriteFile(n.configFile(), []byte(toml), 0o600))
}

func (n *Node) configFile() string { return filepath.Join(n.Dir, "config.toml") }

// makeBridge makes the bridge before the first pod does. The plugin keeps it
// forever, and it is not a pod's leak.
func (n *Node) makeBridge() {
	n.t.Helper()
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.Bridge}}
	n.must("making the bridge", n.inNetns(func() error { return netlink.LinkAdd(bridge) }))
}

// WriteNetwork writes the node's CNI configuration, and returns its path. The
// file comes by rename, as from a careful installer.
func (n *Node) WriteNetwork() string {
	n.t.Helper()
	plugins := []Object{n.BridgePlugin()}
	if n.options.portMap {
		plugins = append(plugins, Object{"type": "portmap", "capabilities": Object{"portMappings": true}, "snat": true})
	}
	return n.WriteConflist("10-test.conflist", plugins...)
}

// WriteConflist writes a CNI configuration with these plugins and the name of
// the node's network, by rename, and returns its path.
func (n *Node) WriteConflist(file string, plugins ...Object) string {
	n.t.Helper()
	data, err := json.MarshalIndent(Object{"cniVersion": "1.1.0", "name": n.Network, "plugins": plugins}, "", "  ")
	n.must("encoding the CNI configuration", err)
	half, path := filepath.Join(n.Dir, "half.conflist"), filepath.Join(n.CNIConf, file)
	n.must("writing the CNI configuration", os.WriteFile(half, data, 0o644))
	n.must("moving the CNI configuration in", os.Rename(half, path))
	return path
}

// BridgePlugin is the configuration of the bridge plugin with host-local
// addresses, as [Node.WriteNetwork] uses it.
func (n *Node) BridgePlugin() Object {
	ranges := [][]Object{{{"subnet": subnet4}}}
	routes := []Object{{"dst": "0.0.0.0/0"}}
	if n.options.dualStack {
		ranges = append(ranges, []Object{{"subnet": subnet6}})
		routes = append(routes, Object{"dst": "::/0"})
	}
	return Object{
		"type": "bridge", "bridge": n.Bridge,
		"isGateway": true, "ipMasq": true, "hairpinMode": true,
		"ipam": Object{
			"type": "host-local", "dataDir": filepath.Dir(n.Addresses),
			"ranges": ranges, "routes": routes,
		},
	}
}
