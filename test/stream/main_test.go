// Package stream tests exec, attach and port-forward with the clients that kubectl uses, client-go's, against
// the real daemon.
package stream

import (
	"context"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/protobuf/proto"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) {
	// What client-go says of clients that are made to fail.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(harness.Main(m))
}

// patience is the longest that a test waits for what has no limit of its own.
const patience = 3 * time.Minute

var check = harness.Check

func limited(t testing.TB) context.Context { return harness.Limited(t, patience) }

func eventually(t testing.TB, what string, holds func() bool) {
	harness.Eventually(t, what, patience, holds)
}

// pod is a pod with one container, and a way to the daemon's listener.
type pod struct {
	*harness.Node
	t         testing.TB
	id        string
	container string
	relay     string // leads to where the daemon listens
}

// newPod runs a script in a pod.
func newPod(t testing.TB, script string, change func(*runtimeapi.ContainerConfig), opts ...harness.Option) *pod {
	const streaming = "metrics_address = '127.0.0.1:9440'\n[streaming]\naddress = '127.0.0.1:10010'\n"
	n := harness.NewNode(t, append([]harness.Option{harness.Config(streaming), harness.Parallel()}, opts...)...)
	n.ImportBusybox()
	sandbox := n.PodConfig("web")
	p := &pod{Node: n, t: t, id: n.RunPod(sandbox), relay: n.Relay("127.0.0.1:10010")}
	config := harness.Container("app", "/bin/sh", "-c", script)
	if change != nil {
		change(config)
	}
	p.container = n.RunContainer(p.id, sandbox, config)
	return p
}

// reach makes a URL of the daemon's one that the test can dial.
func (p *pod) reach(text string) *url.URL {
	u, err := url.Parse(text)
	check(p.t, err)
	u.Host = p.relay
	return u
}

func (p *pod) execURL(r *runtimeapi.ExecRequest) *url.URL {
	r.ContainerId = p.container
	return p.reach(harness.Call(p.t, p.Runtime.Exec, r).Url)
}

func (p *pod) attachURL(r *runtimeapi.AttachRequest) *url.URL {
	r = proto.CloneOf(r) // several clients ask with one request
	r.ContainerId = p.container
	return p.reach(harness.Call(p.t, p.Runtime.Attach, r).Url)
}

// client makes an executor for a URL.
type client func(t testing.TB, u *url.URL) remotecommand.Executor

func spdyClient(t testing.TB, u *url.URL) remotecommand.Executor {
	e, err := remotecommand.NewSPDYExecutor(clientConfig(), http.MethodPost, u)
	check(t, err)
	return e
}

func v5Client(t testing.TB, u *url.URL) remotecommand.Executor {
	return webSocketClient(t, u, "v5.channel.k8s.io")
}

func v4Client(t testing.TB, u *url.URL) remotecommand.Executor {
	return webSocketClient(t, u, "v4.channel.k8s.io")
}

func webSocketClient(t testing.TB, u *url.URL, protocol string) remotecommand.Executor {
	e, err := remotecommand.NewWebSocketExecutorForProtocols(clientConfig(), http.MethodGet, u.String(), protocol)
	check(t, err)
	return e
}

func clientConfig() *rest.Config {
	return &rest.Config{TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

var clients = map[string]client{"SPDY": spdyClient, "WebSocket v5": v5Client, "WebSocket v4": v4Client}

type streams = remotecommand.StreamOptions

// session runs one to its end.
func (p *pod) session(c client, u *url.URL, s streams) error {
	return c(p.t, u).StreamWithContext(limited(p.t), s)
}

// webSocket dials one, and asks for protocols.
func (p *pod) webSocket(u *url.URL, protocols ...string) (*websocket.Conn, error) {
	config, err := websocket.NewConfig("ws://"+u.Host+u.Path, "http://localhost")
	check(p.t, err)
	config.Protocol = protocols
	conn, err := config.DialContext(limited(p.t))
	if err == nil {
		p.t.Cleanup(func() { _ = conn.Close() })
		err = conn.SetDeadline(time.Now().Add(patience))
	}
	return conn, err
}

// shell is an exec of a script.
func shell(script string) *runtimeapi.ExecRequest {
	return &runtimeapi.ExecRequest{Cmd: []string{"/bin/sh", "-c", script}, Stdout: true, Stderr: true}
}
