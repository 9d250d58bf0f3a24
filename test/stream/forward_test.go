package stream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func dialer(p *pod) func(context.Context, string, string) (net.Conn, error) {
	return func(_ context.Context, _, address string) (net.Conn, error) { return p.Dial(address) }
}

// forwardClient is how client-go opens a port-forward.
type forwardClient func(t testing.TB, u *url.URL) httpstream.Dialer

func spdyForward(t testing.TB, u *url.URL) httpstream.Dialer {
	t.Helper()
	transport, upgrader, err := spdy.RoundTripperFor(clientConfig())
	check(t, err)
	return spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, u)
}

func tunnelForward(t testing.TB, u *url.URL) httpstream.Dialer {
	t.Helper()
	d, err := portforward.NewSPDYOverWebsocketDialer(u, clientConfig())
	check(t, err)
	return d
}

var forwardClients = map[string]forwardClient{"SPDY": spdyForward, "WebSocket": tunnelForward}

func (p *pod) forwardURL(ports ...int32) *url.URL {
	p.t.Helper()
	answer, err := p.Runtime.PortForward(limited(p.t), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: ports})
	check(p.t, err)
	return p.reach(answer.Url)
}

// forward forwards ports of the pod as kubectl does, and returns where.
func (p *pod) forward(client forwardClient, ports ...int) (addresses []string, stop func()) {
	p.t.Helper()
	var pairs []string
	for _, port := range ports {
		pairs = append(pairs, fmt.Sprintf("0:%d", port))
	}
	stopped, ready, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	f, err := portforward.NewOnAddresses(client(p.t, p.forwardURL()), []string{"127.0.0.1"}, pairs, stopped, ready, io.Discard, io.Discard)
	check(p.t, err)
	go func() {
		defer close(ended)
		_ = f.ForwardPorts()
	}()
	select {
	case <-ready:
	case <-time.After(patience):
		p.t.Fatal("port-forward is not ready")
	}
	forwarded, err := f.GetPorts()
	check(p.t, err)
	for _, port := range forwarded {
		addresses = append(addresses, fmt.Sprintf("127.0.0.1:%d", port.Local))
	}
	return addresses, func() { close(stopped); <-ended }
}

func echo(conn *net.TCPConn) {
	_, _ = io.Copy(conn, conn)
	_ = conn.CloseWrite()
}

// exchange sends, half-closes and reads to the end.
func exchange(t testing.TB, address string, data []byte) []byte {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	go func() {
		_, _ = conn.Write(data)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	sum := sha256.New()
	if _, err := io.Copy(sum, conn); err != nil {
		t.Error(err)
	}
	return sum.Sum(nil)
}

// Several ports, one on IPv6 alone, many connections, one session.
//
// cri: PortForward
// cri: PortForwardRequest.pod_sandbox_id
func TestPortForward(t *testing.T) {
	p := newPod(t, forever, nil)
	p.ServeInPod(p.id, "tcp4", "127.0.0.1:7", echo)
	p.ServeInPod(p.id, "tcp6", "[::1]:8", echo)
	data := make([]byte, 16<<20)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(data)
	for name, client := range forwardClients {
		addresses, stop := p.forward(client, 7, 8)
		began := time.Now()
		for i, address := range addresses {
			if got := exchange(t, address, data); !bytes.Equal(got, hash(data)) {
				t.Errorf("%s, port %d: other bytes", name, i)
			}
		}
		t.Logf("%s: twice %d MiB there and back in %v", name, len(data)>>20, time.Since(began))
		const many = 20
		same := make(chan bool)
		for i := range many {
			go func() {
				part := data[:i*i*1000]
				same <- bytes.Equal(exchange(t, addresses[i%2], part), hash(part))
			}()
		}
		for range many {
			if !<-same {
				t.Errorf("%s: several at once: other bytes", name)
			}
		}
		stop()
	}
}

// cri: ExecSyncRequest.cmd ExecSyncRequest.container_id
func TestPortForwardOfTheHostNetwork(t *testing.T) {
	n := harness.NewNode(t, harness.Config("[streaming]\naddress = '127.0.0.1:10010'\n"), harness.Parallel())
	n.ImportBusybox()
	p := runPod(t, n, "nc -ll -p 7 -e cat & "+forever, nil, harness.HostNetwork())
	p.awaitPort(7)
	addresses, stop := p.forward(spdyForward, 7)
	defer stop()
	if got := exchange(t, addresses[0], []byte("hello")); !bytes.Equal(got, hash([]byte("hello"))) {
		t.Error("other bytes")
	}
}

// awaitPort waits until someone listens in the pod.
func (p *pod) awaitPort(port int) {
	p.t.Helper()
	eventually(p.t, fmt.Sprintf("port %d is open", port), func() bool {
		answer, err := p.Runtime.ExecSync(limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: []string{"cat", "/proc/net/tcp", "/proc/net/tcp6"}})
		check(p.t, err)
		return strings.Contains(string(answer.Stdout), fmt.Sprintf(":%04X ", port))
	})
}

// noErrors: clients that go away are nothing that the node's owner has to know.
func (p *pod) noErrors() {
	p.t.Helper()
	for line := range strings.Lines(p.Log()) {
		if strings.Contains(line, "level=ERROR") {
			p.t.Errorf("the daemon says: %s", line)
		}
	}
}
