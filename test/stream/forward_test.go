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
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func dialer(p *pod) func(context.Context, string, string) (net.Conn, error) {
	return func(_ context.Context, _, address string) (net.Conn, error) { return p.dial(address) }
}

// forward forwards a port of the pod as kubectl does, and returns where.
func (p *pod) forward(port int) (address string, errs *safe, stop func()) {
	p.t.Helper()
	answer, err := p.Runtime.PortForward(limited(p.t), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: []int32{int32(port)}})
	check(p.t, err)
	transport, upgrader, err := spdy.RoundTripperFor(clientConfig())
	check(p.t, err)
	d := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, p.reach(answer.Url))
	stopped, ready, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	errs = &safe{}
	f, err := portforward.NewOnAddresses(d, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, stopped, ready, io.Discard, errs)
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
	ports, err := f.GetPorts()
	check(p.t, err)
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local), errs, func() { close(stopped); <-ended }
}

// exchange sends, half-closes and reads to the end.
func exchange(t testing.TB, address string, data []byte) []byte {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	check(t, err)
	defer conn.Close()
	check(t, conn.SetDeadline(time.Now().Add(patience)))
	go func() {
		_, _ = conn.Write(data)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	sum := sha256.New()
	_, err = io.Copy(sum, conn)
	check(t, err)
	return sum.Sum(nil)
}

func TestPortForward(t *testing.T) {
	p := newPod(t, "nc -ll -p 7 -e cat & "+forever, nil)
	data := make([]byte, many)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(data)
	for name, port := range map[string]int{"IPv4": 7} {
		p.awaitPort(port)
		address, _, stop := p.forward(port)
		began := time.Now()
		if got := exchange(t, address, data); !bytes.Equal(got, hash(data)) {
			t.Errorf("%s: other bytes", name)
		}
		t.Logf("%s: %d MiB there and back in %v", name, many>>20, time.Since(began))
		many := make(chan bool)
		for i := range 10 {
			go func() { many <- bytes.Equal(exchange(t, address, data[:i*1000]), hash(data[:i*1000])) }()
		}
		for range 10 {
			if !<-many {
				t.Errorf("%s: several at once: other bytes", name)
			}
		}
		stop()
	}
}

// awaitPort waits until somebody listens in the pod.
func (p *pod) awaitPort(port int) {
	p.t.Helper()
	eventually(p.t, fmt.Sprintf("port %d is open", port), func() bool {
		answer, err := p.Runtime.ExecSync(limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: []string{"cat", "/proc/net/tcp", "/proc/net/tcp6"}})
		check(p.t, err)
		return strings.Contains(string(answer.Stdout), fmt.Sprintf(":%04X ", port))
	})
}

func TestPortForwardRefused(t *testing.T) {
	p := newPod(t, "nc -ll -p 7 -e cat & "+forever, nil)
	p.awaitPort(7)
	address, _, stop := p.forward(81)
	conn, err := net.Dial("tcp", address)
	check(t, err)
	_, _ = io.Copy(io.Discard, conn)
	eventually(t, "the error says why", func() bool { return strings.Contains(p.Log(), "connection refused") })
	stop()
	_, err = p.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
	check(t, err)
	_, err = p.Runtime.PortForward(limited(t), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: []int32{7}})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a stopped pod: %v", err)
	}
}

func TestPortForwardOfTheHostNetwork(t *testing.T) {
	n := harness.NewNode(t, harness.Config("[streaming]\naddress = '127.0.0.1:10010'\n"), harness.Parallel())
	n.ImportBusybox()
	p := runPod(t, n, "nc -ll -p 7 -e cat & "+forever, nil, harness.HostNetwork())
	p.awaitPort(7)
	address, _, stop := p.forward(7)
	defer stop()
	if got := exchange(t, address, []byte("hello")); !bytes.Equal(got, hash([]byte("hello"))) {
		t.Error("other bytes")
	}
}
