package e2e

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// gateway is the node's address on the bridge.
const gateway = "10.88.0.1"

// dialTime is the longest that a connection within a node may take, two repeated SYNs
// included (after 1 s and 3 s). One that is refused is refused at once.
const dialTime = 5 * time.Second

// serve answers each connection to a port of the pod with a text.
func serve(t *testing.T, n *harness.Node, id, address, text string) {
	t.Helper()
	var listener net.Listener
	inNetwork(t, pausePID(t, n, id), func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	})
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(connection, text)
			connection.Close()
		}
	}()
}

// fetch reads what a server sends to the node.
func fetch(n *harness.Node, address string) (text string, err error) {
	n.RunInNetns(func() error {
		var connection net.Conn
		if connection, err = net.DialTimeout("tcp", address, dialTime); err != nil {
			return nil
		}
		defer connection.Close()
		var data []byte
		data, err = io.ReadAll(connection)
		text = string(data)
		return nil
	})
	return text, err
}

// cri: PortMapping.container_port
func TestHostPortIsReachable(t *testing.T) {
	n := newNode(t, harness.PortMap())
	config := n.PodConfig("web", harness.HostPort(8080, 80), harness.HostPort(8081, 81))
	// Without a host port it only informs.
	config.PortMappings = append(config.PortMappings, &runtimeapi.PortMapping{ContainerPort: 82})
	id := n.RunPod(config)
	serve(t, n, id, ":80", "eighty")
	serve(t, n, id, ":81", "eighty-one")
	for port, want := range map[int]string{8080: "eighty", 8081: "eighty-one"} {
		if got, err := fetch(n, fmt.Sprintf("%s:%d", gateway, port)); got != want {
			t.Errorf("port %d: got %q, error %v", port, got, err)
		}
	}
	address := podStatus(t, n, id).Network.Ip
	if got, err := fetch(n, address+":80"); got != "eighty" {
		t.Errorf("at the pod's own address: got %q, error %v", got, err)
	}
	check(t, stop(t, n, id))
	if got, err := fetch(n, gateway+":8080"); err == nil {
		t.Errorf("the host port answers %q after Stop", got)
	}
}

// cri: PodSandboxConfig.port_mappings PortMapping.host_ip
func TestHostPortOfOneAddress(t *testing.T) {
	n := newNode(t, harness.PortMap())
	// The bridge has its address only after the first pod.
	n.RunPod(n.PodConfig("first"))
	config := n.PodConfig("web", harness.HostPort(8080, 80))
	config.PortMappings[0].HostIp = gateway
	serve(t, n, n.RunPod(config), ":80", "here")
	if got, err := fetch(n, gateway+":8080"); got != "here" {
		t.Errorf("got %q, error %v", got, err)
	}
	if got, err := fetch(n, "127.0.0.1:8080"); err == nil {
		t.Errorf("another address answers %q", got)
	}
}

func TestPodsReachEachOther(t *testing.T) {
	n := newNode(t)
	server, client := n.RunPod(n.PodConfig("server")), n.RunPod(n.PodConfig("client"))
	serve(t, n, server, ":80", "hello")
	address := podStatus(t, n, server).Network.Ip
	inNetwork(t, pausePID(t, n, client), func() error {
		connection, err := net.DialTimeout("tcp", address+":80", dialTime)
		if err != nil {
			return err
		}
		defer connection.Close()
		if text, err := io.ReadAll(connection); string(text) != "hello" {
			return fmt.Errorf("got %q: %w", text, err)
		}
		return nil
	})
}

func TestLoopbackIsUp(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	serve(t, n, id, "127.0.0.1:80", "self")
	inNetwork(t, pausePID(t, n, id), func() error {
		connection, err := net.DialTimeout("tcp", "127.0.0.1:80", dialTime)
		if err == nil {
			connection.Close()
		}
		return err
	})
}
