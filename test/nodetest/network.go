package nodetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
)

// makeNetns makes the node's network namespace, loopback up. It has no name, so it ends with the test's
// process: an open descriptor holds it.
func (n *Node) makeNetns() {
	n.must("making the network namespace", process.OnDisposableThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if n.netns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	}))
}

// RunInNetns calls do on a thread that is in the node's network namespace. Programs that do starts are in
// there too, goroutines that it starts are not. An error of do fails the test; do itself must not, as it runs
// on another goroutine.
func (n *Node) RunInNetns(do func() error) { n.must("in its network namespace", n.inNetns(do)) }

func (n *Node) inNetns(do func() error) error {
	return Inside(fmt.Sprint("/proc/self/fd/", n.netns.Fd()), do)
}

// Inside calls do on a thread that has joined a namespace, by its file, and that ends then.
func Inside(file string, do func() error) error {
	return process.OnDisposableThread(func() error {
		namespace, err := os.Open(file)
		if err != nil {
			return err
		}
		defer namespace.Close()
		// A thread that shares its root directory joins no mount namespace.
		if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(namespace.Fd()), 0)); err != nil {
			return fmt.Errorf("join %s: %w", file, err)
		}
		return do()
	})
}

// Listen listens in the node's network namespace until the test ends.
func (n *Node) Listen(address string) (listener net.Listener) {
	n.RunInNetns(func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	})
	n.t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// Dial connects from inside the node's network namespace.
func (n *Node) Dial(address string) (conn net.Conn, err error) {
	n.RunInNetns(func() error {
		conn, err = net.DialTimeout("tcp", address, settleTime)
		return nil
	})
	return conn, err
}

// Relay leads from the test's network namespace to an address in the node's, until the test ends, and returns
// where: clients dial as they like.
func (n *Node) Relay(server string) (address string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	n.must("listening for a relay", err)
	n.t.Cleanup(func() { _ = listener.Close() })
	go serve(listener, func(client *net.TCPConn) {
		conn, err := n.Dial(server)
		if err != nil {
			_ = client.Close()
			return
		}
		go join(conn, client)
		go join(client, conn)
	})
	return listener.Addr().String()
}

func join(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		_, _ = to.Close(), from.Close()
		return
	}
	_ = to.(*net.TCPConn).CloseWrite()
}

// ServeInPod listens in the network namespace of a pod, and has a function answer each connection, which is
// closed when that returns. The test's end closes the listener.
func (n *Node) ServeInPod(pod, network, address string, answer func(*net.TCPConn)) {
	n.t.Helper()
	pins, err := filepath.Glob(filepath.Join(n.Netns, "*"+pod))
	harness.Need(n.t, err == nil && len(pins) == 1, "network namespaces of pod %s: %q, %v; want one", pod, pins, err)
	var listener net.Listener
	n.must("listening in pod "+pod, Inside(pins[0], func() (err error) {
		listener, err = net.Listen(network, address)
		return err
	}))
	n.t.Cleanup(func() { _ = listener.Close() })
	go serve(listener, func(conn *net.TCPConn) {
		defer conn.Close()
		answer(conn)
	})
}

// serve answers connections until the listener is closed.
func serve(listener net.Listener, answer func(*net.TCPConn)) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go answer(conn.(*net.TCPConn))
	}
}

// The subnets of every node: each is alone in its network namespace.
const (
	subnet4 = "10.88.0.0/16"
	subnet6 = "fd00:88::/64"
)

// Object is a JSON object.
type Object = map[string]any

// configure writes the CNI configuration and that of the daemon.
func (n *Node) configure() {
	n.makeBridge()
	if !n.options.noNetwork {
		n.WriteNetwork()
	}
	toml := fmt.Sprintf("cgroup_driver = %q\ncgroup_parent = %q\ncontainerd_socket = '%s/containerd.sock'\n%s",
		harness.CgroupDriver(), n.CgroupParent, n.Dir, n.options.config+n.options.runtimes)
	if !strings.Contains(toml, "[nri]") { // each node has its own: the default is one socket for the machine
		toml += fmt.Sprintf("\n[nri]\nsocket = '%[1]s/nri/nri.sock'\nplugin_dir = '%[1]s/nri'\nconfig_dir = '%[1]s/nri'\n", n.Dir)
	}
	n.must("writing the daemon's configuration", os.WriteFile(n.configFile(), []byte(toml), 0o600))
}

func (n *Node) configFile() string { return filepath.Join(n.Dir, "config.toml") }

// makeBridge makes the bridge before the first pod does. The plugin keeps it forever, and it is not a pod's leak.
func (n *Node) makeBridge() {
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.Bridge}}
	n.must("making the bridge", n.inNetns(func() error { return netlink.LinkAdd(bridge) }))
}

// WriteNetwork writes the node's CNI configuration, and returns its path. The file comes by rename, as from a
// careful installer.
func (n *Node) WriteNetwork() string {
	plugins := []Object{n.BridgePlugin()}
	if n.options.portMap {
		plugins = append(plugins, Object{"type": "portmap", "capabilities": Object{"portMappings": true}, "snat": true})
	}
	return n.WriteConflist("10-test.conflist", plugins...)
}

// WriteConflist writes a CNI configuration with these plugins and the name of the node's network, by rename,
// and returns its path.
func (n *Node) WriteConflist(file string, plugins ...Object) string {
	data, err := json.MarshalIndent(Object{"cniVersion": "1.1.0", "name": n.Network, "plugins": plugins}, "", "  ")
	n.must("encoding the CNI configuration", err)
	half, path := filepath.Join(n.Dir, "half.conflist"), filepath.Join(n.CNIConf, file)
	n.must("writing the CNI configuration", os.WriteFile(half, data, 0o644))
	n.must("moving the CNI configuration in", os.Rename(half, path))
	return path
}

// BridgePlugin is the configuration of the bridge plugin with host-local addresses, as [Node.WriteNetwork] uses it.
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
		"ipam": Object{"type": "host-local", "dataDir": filepath.Dir(n.Addresses), "ranges": ranges, "routes": routes},
	}
}
