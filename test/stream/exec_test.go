package stream

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

const forever = "while true; do sleep 0.1; done"

// An output that no one asked for does not stop the process.
//
// cri: Exec ExecRequest.cmd ExecRequest.stderr ExecRequest.stdout
func TestExec(t *testing.T) {
	p := newPod(t, forever, nil)
	for name, client := range clients {
		var out, errs bytes.Buffer
		err := p.session(client, p.execURL(shell("echo out; echo err >&2; exit 42")), streams{Stdout: &out, Stderr: &errs})
		var exit utilexec.CodeExitError
		harness.Want(t, errors.As(err, &exit) && exit.Code == 42, "%s: %v, want exit code 42", name, err)
		harness.Want(t, out.String() == "out\n" && errs.String() == "err\n", "%s: stdout %q, stderr %q", name, &out, &errs)
		harness.WantError(t, p.session(client, p.execURL(&runtimeapi.ExecRequest{Cmd: []string{"/no/such"}, Stdout: true}), streams{Stdout: io.Discard}))
		errs.Reset()
		err = p.session(client, p.execURL(&runtimeapi.ExecRequest{Cmd: []string{"sh", "-c", "seq 100000; echo err >&2"}, Stderr: true}), streams{Stderr: &errs})
		harness.Want(t, err == nil && errs.String() == "err\n", "%s: stderr alone: %v, %q", name, err, &errs)
	}
}

// Bytes go in and come out, and are as they were, also when there are many more than any buffer holds; then
// comes the exit code.
//
// cri: ExecRequest.stdin
func TestExecBytes(t *testing.T) {
	p := newPod(t, forever, nil)
	for _, of := range []struct {
		name   string
		client client
		size   int64
	}{{"SPDY", spdyClient, 500 << 20}, {"WebSocket v5", v5Client, 64 << 20}} {
		ctx := harness.Limited(t)
		began := time.Now()
		sent, received := sha256.New(), sha256.New()
		request := shell("cat; exit 7")
		request.Stdin = true
		// No WriterTo: the client takes its chunks as from a file.
		data := struct{ io.Reader }{io.LimitReader(rand.NewChaCha8([32]byte{1}), of.size)}
		err := of.client(t, p.execURL(request)).StreamWithContext(ctx, streams{
			Stdin: io.TeeReader(data, sent), Stdout: received, Stderr: io.Discard,
		})
		var exit utilexec.CodeExitError
		harness.Want(t, errors.As(err, &exit) && exit.Code == 7, "%s: %v, want exit code 7", of.name, err)
		harness.Want(t, bytes.Equal(sent.Sum(nil), received.Sum(nil)), "%s: other bytes", of.name)
		t.Logf("%s: %d MiB in and out, half-closed stdin, in %v", of.name, of.size>>20, time.Since(began))
	}
}

func hash(data []byte) []byte {
	sum := sha256.Sum256(data)
	return sum[:]
}

// terminal waits for its size, and then for a line.
const terminal = "until stty size | grep -q '33 77'; do sleep 0.02; done; stty size; read x; echo got $x"

// wantTerminal runs a session with one. Its input is open until the end: a client that closes its stdin is
// another test.
func (p *pod) wantTerminal(client client, u *url.URL, queue ...remotecommand.TerminalSize) {
	in, typed := io.Pipe()
	defer typed.Close()
	go func() { _, _ = io.WriteString(typed, "typed\n") }()
	var out safe
	err := p.session(client, u, streams{Stdin: in, Stdout: &out, Tty: true, TerminalSizeQueue: (*sizes)(&queue)})
	harness.Want(p.t, err == nil && strings.Contains(out.String(), "33 77\r\n") && strings.Contains(out.String(), "got typed\r\n"),
		"%v, %q", err, out.String())
}

// cri: ExecRequest.tty
func TestExecTerminal(t *testing.T) {
	p := newPod(t, forever, nil)
	for _, client := range clients {
		request := &runtimeapi.ExecRequest{Cmd: []string{"sh", "-c", terminal}, Stdin: true, Stdout: true, Tty: true}
		p.wantTerminal(client, p.execURL(request), remotecommand.TerminalSize{Width: 80, Height: 24}, remotecommand.TerminalSize{Width: 77, Height: 33})
	}
}

type sizes []remotecommand.TerminalSize

func (s *sizes) Next() (first *remotecommand.TerminalSize) {
	if len(*s) > 0 {
		first, *s = &(*s)[0], (*s)[1:]
	}
	return first
}

// cri: AttachRequest.container_id
func TestBadRequests(t *testing.T) {
	p := newPod(t, forever, nil)
	for field, r := range harness.Sorted(map[string]*runtimeapi.ExecRequest{
		"stderr":                {ContainerId: p.container, Cmd: []string{"true"}, Tty: true, Stderr: true},
		"stdin, stdout, stderr": {ContainerId: p.container, Cmd: []string{"true"}},
		"cmd":                   {ContainerId: p.container, Stdout: true},
		"container id":          {Cmd: []string{"true"}, Stdout: true},
	}) {
		nodetest.WantCode(t, nodetest.Err(t, p.Runtime.Exec, r), codes.InvalidArgument, field)
	}
	_, err := p.Runtime.Attach(harness.Limited(t), &runtimeapi.AttachRequest{ContainerId: p.container, Stdout: true, Tty: true})
	nodetest.WantCode(t, err, codes.InvalidArgument, "tty")
	_, err = p.Runtime.PortForward(harness.Limited(t), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: []int32{0}})
	nodetest.WantCode(t, err, codes.InvalidArgument, "port")
}

// cri: ExecRequest.container_id
func TestTokens(t *testing.T) {
	p := newPod(t, forever, nil, nodetest.Config("max_open = 3\n"))
	u := p.execURL(shell("echo once"))
	var out bytes.Buffer
	check(t, p.session(spdyClient, u, streams{Stdout: &out, Stderr: io.Discard}))
	err := p.session(spdyClient, u, streams{Stdout: &out, Stderr: io.Discard})
	harness.Want(t, err != nil && out.String() == "once\n", "a token worked twice: %v, %q", err, &out)
	for _, path := range []string{"/", "/exec", "/exec/", "/exec/x", "/metrics"} {
		answer, err := http.Get("http://" + p.relay + path)
		check(t, err)
		answer.Body.Close()
		harness.Want(t, answer.StatusCode == http.StatusNotFound, "%s: %s", path, answer.Status)
	}
	token := u.Path[strings.LastIndex(u.Path, "/")+1:]
	harness.Want(t, len(token) >= 20 && !strings.Contains(p.Log(), token), "token %q is short or in the log", token)
	for range 4 {
		r := shell("true")
		r.ContainerId = p.container
		_, err = p.Runtime.Exec(harness.Limited(t), r)
	}
	nodetest.WantCode(t, err, codes.ResourceExhausted)
}

// unread is more than a process's pipe holds, and less than the sockets on the way do: with those full, a
// client's end does not arrive either.
const unread = 128 << 10

// settle waits until the container has its own processes only.
func (p *pod) settle() {
	harness.Eventually(p.t, "the processes of aborted clients are gone", func() bool {
		text := p.run("ps", "-o", "args")
		return !strings.Contains(text, "sleep 1000") && !strings.Contains(text, "cat") && !strings.Contains(text, "yes")
	})
}

// An exec is in the container, in each way there is, and never on the host.
//
// cri: LinuxContainerSecurityContext.run_as_group LinuxContainerSecurityContext.run_as_user
// cri: LinuxContainerSecurityContext.supplemental_groups
func TestExecJoinsTheContainer(t *testing.T) {
	p := newPod(t, forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
			RunAsUser:        &runtimeapi.Int64Value{Value: 1000}, RunAsGroup: &runtimeapi.Int64Value{Value: 1000},
			SupplementalGroups: []int64{3000}, NoNewPrivs: true,
			Capabilities: &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddCapabilities: []string{"NET_BIND_SERVICE"}},
			Seccomp:      &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
		}
	})
	// What the kernel says of the container's process 1, and then of the exec itself.
	const looks = `for p in 1 self; do cd /proc/$p/ns; for k in cgroup ipc mnt net pid user uts; do readlink $k; done
grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)' ../status; stat -c %d:%i ../root/etc/passwd; cat ../cgroup; echo; done`
	for name, client := range clients {
		var out bytes.Buffer
		check(t, p.session(client, p.execURL(shell(looks)), streams{Stdout: &out, Stderr: io.Discard}))
		first, own, _ := strings.Cut(out.String(), "\n\n")
		lines, want := strings.Split(strings.TrimSpace(own), "\n"), strings.Split(first, "\n")
		below := func(i int) bool {
			return strings.Contains(want[i], ":/") && strings.HasPrefix(lines[i], strings.TrimSuffix(want[i], "/")+"/")
		} // a cgroup
		for i, line := range lines {
			harness.Need(t, len(lines) == len(want) && len(lines) >= 20 && (line == want[i] || below(i)),
				"%s: the exec has %q, the container %q; of all of it, %q and %q", name, line, want[min(i, len(want)-1)], lines, want)
		}
		harness.Want(t, strings.Contains(own, "Seccomp:\t2"), "%s: no filter of system calls: %s", name, own)
		for _, kind := range []string{"ipc", "mnt", "net", "pid", "uts"} {
			nodes, err := os.Readlink("/proc/self/ns/" + kind)
			harness.Want(t, err == nil && !strings.Contains(own, nodes), "%s: namespace %s is the node's: %s, %v", name, kind, own, err)
		}
	}
}

// The subprotocols of exec and attach over a WebSocket, and whether the last message is a status in JSON.
var webSocketProtocols = map[string]bool{
	"": false, "channel.k8s.io": false, "base64.channel.k8s.io": false,
	"v2.channel.k8s.io": false, "v2.base64.channel.k8s.io": false, "v3.channel.k8s.io": false, "v3.base64.channel.k8s.io": false,
	"v4.channel.k8s.io": true, "v4.base64.channel.k8s.io": true,
	"v5.channel.k8s.io": true, "v5.base64.channel.k8s.io": true,
}

// rawExec runs a command over a WebSocket and gives what comes on each channel, and the channel of the first message.
func (p *pod) rawExec(protocol string, r *runtimeapi.ExecRequest, input string) (channels [5]bytes.Buffer, first int) {
	protocols := []string{"unknown.k8s.io", protocol}
	if protocol == "" {
		protocols = nil
	}
	conn, err := p.webSocket(p.execURL(r), protocols...)
	check(p.t, err)
	defer conn.Close()
	encoded := strings.Contains(protocol, "base64")
	if input != "" && encoded {
		check(p.t, websocket.Message.Send(conn, "0"+base64.StdEncoding.EncodeToString([]byte(input))))
	} else if input != "" {
		check(p.t, websocket.Message.Send(conn, append([]byte{0}, input...)))
	}
	first = -1
	for {
		var message []byte
		err := websocket.Message.Receive(conn, &message)
		if errors.Is(err, io.EOF) {
			return channels, first
		}
		check(p.t, err)
		channel, data := int(message[0]), message[1:]
		if encoded {
			channel -= '0'
			data, err = base64.StdEncoding.AppendDecode(nil, data)
			check(p.t, err)
		}
		if first < 0 {
			first = channel
			harness.Want(p.t, len(data) == 0, "%q: the first message is not empty: %q", protocol, data)
		}
		channels[channel].Write(data)
	}
}

// A client may speak any version of the protocol of exec, with and without base64, or none. Before v4 it gets
// a failure as text, and nothing for success. One whose protocols are all unknown is refused.
//
// cri: ContainerConfig.metadata ContainerMetadata.name ExecResponse.url StartContainerRequest.container_id
func TestWebSocketProtocols(t *testing.T) {
	p := newPod(t, forever, nil)
	_, err := p.webSocket(p.execURL(shell("true")), "v9.channel.k8s.io")
	harness.Want(t, err != nil, "v9 is served")
	// A message of ten megabytes is taken in pieces, in order.
	conn, err := p.webSocket(p.execURL(&runtimeapi.ExecRequest{Cmd: []string{"head", "-c", "10000007"}, Stdin: true, Stdout: true}), "v5.channel.k8s.io")
	check(t, err)
	go func() {
		_ = websocket.Message.Send(conn, append([]byte{0}, make([]byte, 10_000_000)...)) // one frame
		_ = websocket.Message.Send(conn, append([]byte{0}, "the end"...))
	}()
	var out bytes.Buffer
	for {
		var message []byte
		if err := websocket.Message.Receive(conn, &message); err != nil {
			break
		}
		if message[0] == 1 {
			out.Write(message[1:])
		}
	}
	harness.Want(t, out.Len() == 10_000_007 && strings.HasSuffix(out.String(), "the end"), "%d bytes came back", out.Len())
	for protocol, inJSON := range webSocketProtocols {
		request := shell("head -c 5; echo >&2 error")
		request.Stdin = true
		channels, first := p.rawExec(protocol, request, "hello")
		harness.Want(t, first == 1 && channels[1].String() == "hello" && channels[2].String() == "error\n",
			"%q: first channel %d, stdout %q, stderr %q", protocol, first, &channels[1], &channels[2])
		want := ""
		if inJSON {
			want = `{"status":"Success"}`
		}
		harness.Same(t, protocol+": how success is told", channels[3].String(), want)
		channels, first = p.rawExec(protocol, &runtimeapi.ExecRequest{Cmd: []string{"sh", "-c", "exit 7"}, Stderr: true}, "")
		harness.Want(t, first == 2, "%q: without stdout the first channel is %d", protocol, first)
		want = "command terminated with non-zero exit code: exit code 7"
		if inJSON {
			want = `"reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}`
		}
		text := channels[3].String()
		harness.Want(t, text == want || inJSON && strings.Contains(text, want), "%q: exit code 7 is told as %q", protocol, text)
	}
}
