package stream

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/httpstream"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// rawForward is a session whose streams the test has in its hands.
func (p *pod) rawForward(client forwardClient) httpstream.Connection {
	p.t.Helper()
	conn, protocol, err := client(p.t, p.forwardURL()).Dial("portforward.k8s.io")
	check(p.t, err)
	if protocol != "portforward.k8s.io" {
		p.t.Fatalf("protocol %q", protocol)
	}
	p.t.Cleanup(func() { conn.Close() })
	return conn
}

func open(t testing.TB, conn httpstream.Connection, kind string, port, id int) httpstream.Stream {
	t.Helper()
	header := http.Header{}
	header.Set("streamType", kind)
	header.Set("port", strconv.Itoa(port))
	header.Set("requestID", strconv.Itoa(id))
	stream, err := conn.CreateStream(header)
	check(t, err)
	return stream
}

func openPair(t testing.TB, conn httpstream.Connection, port, id int) (data, errs httpstream.Stream) {
	t.Helper()
	errs = open(t, conn, "error", port, id)
	check(t, errs.Close())
	return open(t, conn, "data", port, id), errs
}

// readAll reads a stream to its end.
func readAll(t testing.TB, from io.Reader) string {
	t.Helper()
	type result struct {
		data []byte
		err  error
	}
	read := make(chan result, 1)
	go func() {
		data, err := io.ReadAll(from)
		read <- result{data, err}
	}()
	select {
	case r := <-read:
		check(t, r.err)
		return string(r.data)
	case <-time.After(patience):
		t.Fatal("the stream has no end")
		return ""
	}
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
		if answer := readAll(t, data); answer != "100000" {
			t.Errorf("%s: after the client's end: %q", name, answer)
		}
		if text := readAll(t, errs); text != "" {
			t.Errorf("%s: error %q", name, text)
		}
		data, _ = openPair(t, conn, 8, 1)
		if answer := readAll(t, data); answer != "that is all" {
			t.Errorf("%s: before the pod's end: %q", name, answer)
		}
		for range 100 {
			_, err := data.Write(make([]byte, 1000))
			check(t, err)
		}
		check(t, data.Close())
		select {
		case n := <-counted:
			if n != 100_000 {
				t.Errorf("%s: after its end the pod got %d bytes", name, n)
			}
		case <-time.After(patience):
			t.Fatalf("%s: the pod does not see the client's end", name)
		}
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
	for name, client := range forwardClients {
		data, _ := openPair(t, p.rawForward(client), 7, 0)
		_, err := io.ReadFull(data, make([]byte, 100_000))
		check(t, err)
		check(t, data.Reset())
		select {
		case <-ended:
		case <-time.After(patience):
			t.Fatalf("%s: the pod writes on", name)
		}
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
		if text := readAll(t, errs); !strings.Contains(text, "port 81") || !strings.Contains(text, "connection refused") {
			t.Errorf("%s: error %q", name, text)
		}
		if text := readAll(t, data); text != "" {
			t.Errorf("%s: data %q", name, text)
		}
		data, errs = openPair(t, conn, 7, 1)
		_, err := data.Write([]byte("hello"))
		check(t, err)
		check(t, data.Close())
		if text := readAll(t, data) + readAll(t, errs); text != "hello" {
			t.Errorf("%s: after an error: %q", name, text)
		}
	}
	_, err := p.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
	check(t, err)
	_, errs := openPair(t, last, 7, 2)
	if text := readAll(t, errs); !strings.Contains(text, "it is stopped") {
		t.Errorf("a session whose pod is stopped: %q", text)
	}
	_, err = p.Runtime.PortForward(limited(t), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: []int32{7}})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a stopped pod: %v", err)
	}
}

// A WebSocket with two channels for each port, which begin with its number.
func TestPortForwardChannels(t *testing.T) {
	p := newPod(t, forever, nil)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	u := p.forwardURL(7, 81)
	config, err := websocket.NewConfig("ws://"+u.Host+u.Path, "http://localhost")
	check(t, err)
	config.Protocol = []string{"v4.channel.k8s.io"}
	conn, err := config.DialContext(limited(t))
	check(t, err)
	defer conn.Close()
	check(t, conn.SetDeadline(time.Now().Add(patience)))
	check(t, websocket.Message.Send(conn, append([]byte{0}, "hello"...)))
	var got [4]bytes.Buffer
	for got[0].String() != "\x07\x00hello" || !strings.Contains(got[3].String(), "connection refused") {
		var message []byte
		if err := websocket.Message.Receive(conn, &message); err != nil {
			t.Fatalf("%v; until then %q %q", err, got[0].String(), got[3].String())
		}
		got[message[0]].Write(message[1:])
	}
	for i, port := range []uint16{7, 7, 81, 81} {
		if number := got[i].Next(2); len(number) < 2 || binary.LittleEndian.Uint16(number) != port {
			t.Errorf("channel %d begins with %q", i, number)
		}
	}
}

// A client that does not open the streams of an exec is cut off.
func TestCreationTimeout(t *testing.T) {
	p := newPod(t, forever, nil, harness.Config("creation_timeout = '3s'\n"))
	conn, _, err := spdyForward(t, p.execURL(shell("sleep 1000"))).Dial("v4.channel.k8s.io")
	check(t, err)
	defer conn.Close()
	open(t, conn, "stdout", 0, 0)
	select {
	case <-conn.CloseChan():
	case <-time.After(patience):
		t.Error("exec waits for its streams without end")
	}
}
