package stream

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// forwardClient is how client-go opens a port-forward.
type forwardClient func(t testing.TB, u *url.URL) httpstream.Dialer

func spdyForward(t testing.TB, u *url.URL) httpstream.Dialer {
	transport, upgrader, err := spdy.RoundTripperFor(clientConfig())
	check(t, err)
	return spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, u)
}

func tunnelForward(t testing.TB, u *url.URL) httpstream.Dialer {
	d, err := portforward.NewSPDYOverWebsocketDialer(u, clientConfig())
	check(t, err)
	return d
}

var forwardClients = map[string]forwardClient{"SPDY": spdyForward, "WebSocket": tunnelForward}

func (p *pod) forwardURL(ports ...int32) *url.URL {
	return p.reach(nodetest.Call(p.t, p.Runtime.PortForward, &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: ports}).Url)
}

// forward forwards ports of the pod as kubectl does, and returns where.
func (p *pod) forward(client forwardClient, ports ...int) (addresses []string, stop func()) {
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
	<-ready
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
	go func() {
		_, _ = conn.Write(data)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	sum := sha256.New()
	_, err = io.Copy(sum, conn)
	harness.Same(t, "the copy", err, nil)
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
			harness.Want(t, bytes.Equal(exchange(t, address, data), hash(data)), "%s, port %d: other bytes", name, i)
		}
		t.Logf("%s: twice %d MiB there and back in %v", name, len(data)>>20, time.Since(began))
		var many sync.WaitGroup
		for i := range 20 {
			many.Go(func() {
				part := data[:i*i*1000]
				harness.Want(t, bytes.Equal(exchange(t, addresses[i%2], part), hash(part)), "%s: several at once: other bytes", name)
			})
		}
		many.Wait()
		stop()
	}
}

// noErrors: clients that go away are nothing that the node's owner has to know.
func (p *pod) noErrors() {
	for line := range strings.Lines(p.Log()) {
		harness.Want(p.t, !strings.Contains(line, "level=ERROR"), "the daemon says: %s", line)
	}
}

// rawForward is a session whose streams the test has in its hands.
func (p *pod) rawForward(client forwardClient) httpstream.Connection {
	conn, protocol, err := client(p.t, p.forwardURL()).Dial("portforward.k8s.io")
	check(p.t, err)
	harness.Need(p.t, protocol == "portforward.k8s.io", "protocol %q", protocol)
	p.t.Cleanup(func() { conn.Close() })
	return conn
}

func open(t testing.TB, conn httpstream.Connection, kind string, port, id int) httpstream.Stream {
	stream, err := conn.CreateStream(http.Header{"Streamtype": {kind}, "Port": {strconv.Itoa(port)}, "Requestid": {strconv.Itoa(id)}})
	check(t, err)
	return stream
}

func openPair(t testing.TB, conn httpstream.Connection, port, id int) (data, errs httpstream.Stream) {
	errs = open(t, conn, "error", port, id)
	check(t, errs.Close())
	return open(t, conn, "data", port, id), errs
}

// readAll reads a stream to its end.
func readAll(t testing.TB, from io.Reader) (text string) {
	data, err := io.ReadAll(from)
	check(t, err)
	return string(data)
}

// Each side closes its half while the other one continues.
func TestPortForwardHalfClose(t *testing.T) {
	p := newPod(t, forever, nil)
	counted := make(chan int, 1)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", func(conn *net.TCPConn) { // answers after the client's end
		data, _ := io.ReadAll(conn)
		_, _ = io.WriteString(conn, strconv.Itoa(len(data)))
	})
	p.ServeInPod(p.id, "tcp", "127.0.0.1:8", func(conn *net.TCPConn) { // listens after its own end
		_, _ = io.WriteString(conn, "that is all")
		_ = conn.CloseWrite()
		data, _ := io.ReadAll(conn)
		counted <- len(data)
	})
	for name, client := range forwardClients {
		conn := p.rawForward(client)
		data, errs := openPair(t, conn, 7, 0)
		_, err := data.Write(make([]byte, 100_000))
		check(t, err)
		check(t, data.Close())
		harness.Same(t, name+": after the client's end", readAll(t, data), "100000")
		harness.Same(t, name+": the error", readAll(t, errs), "")
		data, _ = openPair(t, conn, 8, 1)
		harness.Same(t, name+": before the pod's end", readAll(t, data), "that is all")
		for range 100 {
			_, err := data.Write(make([]byte, 1000))
			check(t, err)
		}
		check(t, data.Close())
		harness.Same(t, name+": what the pod got after its end", <-counted, 100_000)
	}
}

// A client that resets a stream ends the connection to the pod.
//
// cri: PortForwardResponse.url
func TestPortForwardReset(t *testing.T) {
	p := newPod(t, forever, nil)
	ended := make(chan struct{}, 1)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", func(conn *net.TCPConn) {
		for err := error(nil); err == nil; {
			_, err = conn.Write(make([]byte, 1000))
		}
		ended <- struct{}{}
	})
	for _, client := range forwardClients {
		data, _ := openPair(t, p.rawForward(client), 7, 0)
		_, err := io.ReadFull(data, make([]byte, 100_000))
		check(t, err)
		check(t, data.Reset())
		<-ended
	}
}

// The error stream says why there is no connection; the session continues.
//
// cri: PortForwardRequest.port StopPodSandboxRequest.pod_sandbox_id
func TestPortForwardRefused(t *testing.T) {
	p := newPod(t, forever, nil)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	var last httpstream.Connection
	for name, client := range forwardClients {
		conn := p.rawForward(client)
		last = conn
		data, errs := openPair(t, conn, 81, 0)
		text := readAll(t, errs)
		harness.Want(t, strings.Contains(text, "port 81") && strings.Contains(text, "connection refused"), "%s: error %q", name, text)
		harness.Same(t, name+": data", readAll(t, data), "")
		data, errs = openPair(t, conn, 7, 1)
		_, err := data.Write([]byte("hello"))
		check(t, err)
		check(t, data.Close())
		harness.Same(t, name+": after an error", readAll(t, data)+readAll(t, errs), "hello")
	}
	nodetest.Call(t, p.Runtime.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
	_, errs := openPair(t, last, 7, 2)
	harness.Want(t, strings.Contains(readAll(t, errs), "it is stopped"), "a session whose pod is stopped is not told so")
	_, err := p.Runtime.PortForward(harness.Limited(t), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: []int32{7}})
	nodetest.WantCode(t, err, codes.FailedPrecondition)
}

// A WebSocket with two channels for each port, which begin with its number.
func TestPortForwardChannels(t *testing.T) {
	p := newPod(t, forever, nil)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	conn, err := p.webSocket(p.forwardURL(7, 81), "v4.channel.k8s.io")
	check(t, err)
	check(t, websocket.Message.Send(conn, append([]byte{0}, "hello"...)))
	var got [4]bytes.Buffer
	for got[0].String() != "\x07\x00hello" || !strings.Contains(got[3].String(), "connection refused") {
		var message []byte
		err := websocket.Message.Receive(conn, &message)
		harness.Need(t, err == nil, "%v; until then %q %q", err, got[0].String(), got[3].String())
		got[message[0]].Write(message[1:])
	}
	for i, port := range []uint16{7, 7, 81, 81} {
		number := got[i].Next(2)
		harness.Want(t, len(number) >= 2 && binary.LittleEndian.Uint16(number) == port, "channel %d begins with %q", i, number)
	}
}

// A client that does not open the streams of an exec is cut off.
func TestCreationTimeout(t *testing.T) {
	p := newPod(t, forever, nil, nodetest.Config("creation_timeout = '3s'\n"))
	conn, _, err := spdyForward(t, p.execURL(shell("sleep 1000"))).Dial("v4.channel.k8s.io")
	check(t, err)
	defer conn.Close()
	open(t, conn, "stdout", 0, 0)
	<-conn.CloseChan() // exec waits no longer for its streams
}
