// Package stream tests exec, attach and port-forward with the clients that kubectl uses, client-go's, against
// the real daemon.
package stream

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/websocket"
	"google.golang.org/protobuf/proto"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) {
	// What client-go says of clients that are made to fail.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(nodetest.Main(m))
}

var check = harness.Check

// pod is a pod with one container, and a way to the daemon's listener.
type pod struct {
	*nodetest.Node
	t         testing.TB
	id        string
	container string
	relay     string // leads to where the daemon listens
}

// newPod runs a script in a pod.
func newPod(t testing.TB, script string, change func(*runtimeapi.ContainerConfig), opts ...nodetest.Option) *pod {
	const streaming = "metrics_address = '127.0.0.1:9440'\n[streaming]\naddress = '127.0.0.1:10010'\n"
	n := nodetest.New(t, append([]nodetest.Option{nodetest.Config(streaming), nodetest.Parallel()}, opts...)...)
	n.ImportBusybox()
	sandbox := n.PodConfig("web")
	p := &pod{Node: n, t: t, id: n.RunPod(sandbox), relay: n.Relay("127.0.0.1:10010")}
	config := nodetest.Container("app", "/bin/sh", "-c", script)
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
	return p.reach(nodetest.Call(p.t, p.Runtime.Exec, r).Url)
}

func (p *pod) attachURL(r *runtimeapi.AttachRequest) *url.URL {
	r = proto.CloneOf(r) // several clients ask with one request
	r.ContainerId = p.container
	return p.reach(nodetest.Call(p.t, p.Runtime.Attach, r).Url)
}

// client makes an executor for a URL.
type client func(t testing.TB, u *url.URL) remotecommand.Executor

func spdyClient(t testing.TB, u *url.URL) remotecommand.Executor {
	e, err := remotecommand.NewSPDYExecutor(clientConfig(), http.MethodPost, u)
	check(t, err)
	return e
}

func webSocketClient(protocol string) client {
	return func(t testing.TB, u *url.URL) remotecommand.Executor {
		e, err := remotecommand.NewWebSocketExecutorForProtocols(clientConfig(), http.MethodGet, u.String(), protocol)
		check(t, err)
		return e
	}
}

var v5Client, v4Client = webSocketClient("v5.channel.k8s.io"), webSocketClient("v4.channel.k8s.io")

func clientConfig() *rest.Config {
	return &rest.Config{TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

var clients = map[string]client{"SPDY": spdyClient, "WebSocket v5": v5Client, "WebSocket v4": v4Client}

type streams = remotecommand.StreamOptions

// session runs one to its end.
func (p *pod) session(c client, u *url.URL, s streams) error {
	return c(p.t, u).StreamWithContext(harness.Limited(p.t), s)
}

// webSocket dials one, and asks for protocols.
func (p *pod) webSocket(u *url.URL, protocols ...string) (*websocket.Conn, error) {
	config, err := websocket.NewConfig("ws://"+u.Host+u.Path, "http://localhost")
	check(p.t, err)
	config.Protocol = protocols
	conn, err := config.DialContext(harness.Limited(p.t))
	if err != nil {
		return nil, err
	}
	p.t.Cleanup(func() { _ = conn.Close() })
	return conn, nil
}

// shell is an exec of a script.
func shell(script string) *runtimeapi.ExecRequest {
	return &runtimeapi.ExecRequest{Cmd: []string{"/bin/sh", "-c", script}, Stdout: true, Stderr: true}
}

// goroutines asks the daemon's metrics.
func (p *pod) goroutines() (count int) {
	p.t.Helper()
	answer, err := (&http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, DialContext: func(_ context.Context, _, address string) (net.Conn, error) { return p.Dial(address) },
	}}).Get("http://127.0.0.1:9440/metrics")
	check(p.t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	check(p.t, err)
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "go_goroutines %d", &count); err == nil {
			return count
		}
	}
	p.t.Fatalf("no go_goroutines in %s", text)
	return 0
}

type safe = harness.Buffer

// Two are attached; one leaves, the other one continues, and types.
//
// cri: Attach AttachRequest.stdin StopContainerRequest.container_id
func TestAttach(t *testing.T) {
	p := newPod(t, "while read x; do echo out $x; echo err $x >&2; done; echo end", func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, false })
	r := &runtimeapi.AttachRequest{Stdin: true, Stdout: true, Stderr: true}
	first, leave := context.WithCancel(harness.Limited(t))
	in1, type1 := io.Pipe()
	in2, type2 := io.Pipe()
	var out1, err1, out2, err2 safe
	left := make(chan error, 1)
	go func() {
		left <- spdyClient(t, p.attachURL(r)).StreamWithContext(first, streams{Stdin: in1, Stdout: &out1, Stderr: &err1})
	}()
	stayed := make(chan error, 1)
	go func() {
		stayed <- p.session(v5Client, p.attachURL(r), streams{Stdin: in2, Stdout: &out2, Stderr: &err2})
	}()
	harness.Eventually(t, "both see what one types", func() bool {
		fmt.Fprintln(type1, "one")
		return strings.Contains(out1.String(), "out one") && strings.Contains(err1.String(), "err one") && strings.Contains(out2.String(), "out one")
	})
	leave()
	<-left
	harness.Eventually(t, "the other one continues", func() bool {
		fmt.Fprintln(type2, "two")
		return strings.Contains(out2.String(), "out two") && strings.Contains(err2.String(), "err two")
	})
	nodetest.Call(t, p.Runtime.StopContainer, &runtimeapi.StopContainerRequest{ContainerId: p.container})
	check(t, <-stayed) // the container ended
	harness.Want(t, !strings.Contains(out1.String(), "two"), "who left has %q", &out1)
}

// A container whose stdin is closed after its first client.
//
// cri: ContainerConfig.stdin_once
func TestAttachStdinOnce(t *testing.T) {
	p := newPod(t, "cat; echo end; exit 3", func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true })
	var out safe
	err := p.session(spdyClient, p.attachURL(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Stderr: true}), streams{Stdin: strings.NewReader("hello\n"), Stdout: &out, Stderr: io.Discard})
	harness.Want(t, err == nil && out.String() == "hello\nend\n", "%v, %q", err, out.String())
}

// cri: AttachRequest.tty ContainerConfig.tty
func TestAttachTerminal(t *testing.T) {
	p := newPod(t, terminal, func(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true })
	p.wantTerminal(spdyClient, p.attachURL(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Tty: true}), remotecommand.TerminalSize{Width: 77, Height: 33})
}

// Several clients see all that a container writes as fast as it can; one that does not read holds up neither them
// nor the container for long, and is told. Nothing is left of clients whose input the container never reads.
//
// cri: AttachRequest.stderr AttachRequest.stdout
func TestAttachMany(t *testing.T) {
	p := newPod(t, `i=0; while true; do i=$((i+1)); echo line $i "$0"; [ $((i % 1000)) != 0 ] || sleep 0.5; done`,
		func(c *runtimeapi.ContainerConfig) {
			c.Stdin, c.Command = true, append(c.Command, strings.Repeat("x", 2000))
		})
	held := func() int { return len(harness.Glob(t, "/proc", strconv.Itoa(p.Supervisors()[0]), "fd", "*")) }
	before := held()
	harness.Eventually(t, "it has written before a client is attached", func() bool { return strings.Count(p.logged(), "\n") > 20 })
	ctx, leave := context.WithCancel(context.Background())
	attach := func(ctx context.Context, c client, to io.Writer) error {
		return c(t, p.attachURL(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Stderr: true})).StreamWithContext(ctx, streams{Stdin: strings.NewReader(strings.Repeat("x", 300<<10)), Stdout: to, Stderr: io.Discard})
	}
	stop, late := make(chan struct{}), make(chan error, 1)
	outs := make([]safe, 6)
	var sessions sync.WaitGroup
	for i := range outs {
		sessions.Go(func() { _ = attach(ctx, []client{spdyClient, v5Client, v4Client}[i%3], &outs[i]) })
	}
	go func() { late <- attach(harness.Limited(t), spdyClient, &stalled{stop}) }()
	for i := range outs {
		harness.Eventually(t, "each sees 10 MB", func() bool { return outs[i].Len() > 10e6 })
		text := outs[i].String()
		p.contiguous(fmt.Sprintf("client %d", i), text[:strings.LastIndex(text, "\n")])
	}
	leave()
	sessions.Wait()
	harness.Eventually(t, "the supervisor holds no more than before", func() bool { return held() <= before })
	close(stop)
	harness.WantError(t, <-late, "taken nothing for 5s")
	p.contiguous("the log", p.logged())
}

// contiguous checks that lines are numbered without a gap.
func (p *pod) contiguous(what, text string) {
	p.t.Helper()
	next := 0
	for line := range strings.Lines(text) {
		words := strings.SplitN(line, " ", 3)
		number, err := strconv.Atoi(words[min(1, len(words)-1)])
		if words[0] != "line" || err != nil {
			p.t.Errorf("%s: %q", what, line)
			return
		}
		harness.Want(p.t, next == 0 || number == next, "%s: line %d follows line %d", what, number, next-1)
		next = number + 1
	}
}

// logged is what the container's log has, without the time and the stream's name.
func (p *pod) logged() string {
	paths := harness.Glob(p.t, p.Logs, "*", "app.log")
	harness.Need(p.t, len(paths) == 1, "logs: %q", paths)
	var text strings.Builder
	for line := range strings.Lines(string(harness.Read(p.t, paths[0]))) {
		if _, message, ok := strings.Cut(line, " F "); ok {
			text.WriteString(message)
		}
	}
	return text.String()
}
