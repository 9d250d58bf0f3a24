package hostile

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/spdystream"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

var check = harness.Check

// target is a pod with one container, whose streams are attacked.
type target struct {
	*tenant
	container string
}

func newTarget(t testing.TB) *target {
	p := newTenant(t, newNode(t, nodetest.Parallel()), "target")
	return &target{p, p.run("app")}
}

func (p *target) execURL(command ...string) string {
	return nodetest.Call(p.t, p.Runtime.Exec, &runtimeapi.ExecRequest{ContainerId: p.container, Cmd: command, Stdin: true, Stdout: true, Stderr: true}).Url
}

// begin runs a command in a session, and opens its streams: of the error, stdin, stdout and stderr.
func (p *target) begin(command ...string) (c spdyClient, streams []*spdystream.Stream) {
	c = p.upgrade(p.execURL(command...), "v4.channel.k8s.io")
	for _, kind := range []string{"error", "stdin", "stdout", "stderr"} {
		streams = append(streams, c.open(p.t, kind, 0, 0))
	}
	return c, streams
}

func (p *target) forward() spdyClient {
	return p.upgrade(nodetest.Call(p.t, p.Runtime.PortForward, &runtimeapi.PortForwardRequest{PodSandboxId: p.id}).Url, "portforward.k8s.io")
}

// spdyClient is a client that may write what it likes.
type spdyClient struct {
	*spdystream.Connection
	raw net.Conn
}

// upgrade asks for a session over SPDY.
func (p *target) upgrade(address, protocol string) spdyClient {
	raw := p.upgradeRaw(address, protocol)
	conn, err := spdystream.NewConnection(raw, false)
	check(p.t, err)
	go conn.Serve(spdystream.NoOpStreamHandler)
	return spdyClient{conn, raw}
}

// upgradeRaw asks for a session over SPDY that has no client yet.
func (p *target) upgradeRaw(address, protocol string) net.Conn {
	u, err := url.Parse(address)
	check(p.t, err)
	raw, err := p.Dial(u.Host)
	check(p.t, err)
	p.t.Cleanup(func() { raw.Close() })
	_, err = fmt.Fprintf(raw, "POST %s HTTP/1.1\r\nHost: node\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: %s\r\n\r\n", u.Path, protocol)
	check(p.t, err)
	answer, err := http.ReadResponse(bufio.NewReaderSize(raw, 1), nil)
	check(p.t, err)
	harness.Need(p.t, answer.StatusCode == http.StatusSwitchingProtocols, "the upgrade is answered with %s", answer.Status)
	return raw
}

func (c spdyClient) open(t testing.TB, kind string, port, id int) *spdystream.Stream {
	header := http.Header{"Streamtype": {kind}, "Port": {strconv.Itoa(port)}, "Requestid": {strconv.Itoa(id)}} // which an exec ignores
	stream, err := c.CreateStream(header, nil, false)
	check(t, err)
	return stream
}

// memory is what the daemon has allocated, in bytes. Pages of its program are no cost of a session: the
// kernel drops them when memory is short.
func (p *target) memory() int { return harness.ProcKiB(p.t, p.PID(), "RssAnon") << 10 }

// dataFrame is the header of a frame of data, which says any length.
func dataFrame(id uint32, length int) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, id), uint32(length))
}

func echo(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }

// attack: clients: a pod does not read from one connection of a port-forward
// held: the others of its session continue; this one ends with the reason
// field: containerd and CRI-O delay the whole session
func TestAnUnreadConnectionHoldsUpNoOther(t *testing.T) {
	p := newTarget(t)
	stop := make(chan struct{})
	defer close(stop)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:9", func(*net.TCPConn) { <-stop })
	before := p.memory()
	c := p.forward()
	reason := c.open(t, "error", 9, 1)
	told := make(chan string, 1)
	go func() { // at once: this client's library holds up streams for one that is not read
		text := make([]byte, 1000)
		n, _ := reason.Read(text)
		told <- string(text[:n])
	}()
	unread := c.open(t, "data", 9, 1)
	go func() {
		for range 4096 { // 128 MiB
			if _, err := unread.Write(make([]byte, 32<<10)); err != nil {
				return
			}
		}
	}()
	text := ""
	for id := 10; text == ""; id++ { // also while the unread one holds all that it may
		c.open(t, "error", 7, id) // which waits for what is held up, too
		data := c.open(t, "data", 7, id)
		_, err := data.Write([]byte("hello"))
		check(t, err)
		_, err = io.ReadFull(data, make([]byte, 5))
		check(t, err)
		check(t, data.Close())
		select {
		case text = <-told:
		default:
		}
	}
	harness.Want(t, strings.Contains(text, "the pod has taken nothing"), "the reason is %q", text)
	after := p.memory()
	harness.Want(t, after-before <= 8<<20, "the daemon grew from %d to %d KiB", before>>10, after>>10)
}

// attack: clients: one session opens as many connections as it may
// held: 128 connections are served; further connections are refused with an error
func TestManyConnectionsOfASession(t *testing.T) {
	p := newTarget(t)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	c := p.forward()
	for id := range 128 {
		c.open(t, "error", 7, id)
		data := c.open(t, "data", 7, id)
		_, err := data.Write([]byte("x"))
		check(t, err)
		_, err = io.ReadFull(data, make([]byte, 1))
		check(t, err)
	}
	text := make([]byte, 1000)
	n, _ := c.open(t, "error", 7, 1000).Read(text)
	harness.Want(t, strings.Contains(string(text[:n]), "128 connections"), "one more is told %q", text[:n])
}

// attack: clients: thousands of idle connections have no token
// held: CRI and sessions work; the idle connections are closed
// field: containerd's streaming server has no limit
func TestStrangers(t *testing.T) {
	const attempts = 20_000
	p := newTarget(t)
	u, err := url.Parse(p.execURL("true"))
	check(t, err)
	held := make([]net.Conn, 0, attempts)
	defer func() {
		for _, conn := range held {
			conn.Close()
		}
	}()
	p.RunInNetns(func() error {
		for i := range attempts {
			if len(held) == 15_000 { // what this process may hold
				held[0].Close()
				held = held[1:]
			}
			conn, err := net.Dial("tcp", u.Host)
			if err != nil {
				return fmt.Errorf("connection %d: %w", i, err)
			}
			held = append(held, conn)
			if i%500 == 0 {
				nodetest.Call(t, p.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{})
			}
		}
		return nil
	})
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID()))
	check(t, err)
	harness.Want(t, len(files) <= 1000, "the daemon has %d descriptors", len(files))
	for range 5 {
		_, streams := p.begin("echo", "hello")
		out, err := io.ReadAll(streams[2])
		harness.Want(t, err == nil && string(out) == "hello\n", "exec with %d idle connections: %q (%v)", len(held), out, err)
	}
	last := held[len(held)-1]
	_, err = last.Read(make([]byte, 1)) // until the daemon closes it
	harness.WantError(t, err)
}
