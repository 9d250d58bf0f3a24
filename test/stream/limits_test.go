package stream

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// A session that is silent ends, and its process with it, also when the client has stopped to read.
//
// cri: ExecSyncRequest.cmd ExecSyncRequest.container_id
func TestIdleTimeout(t *testing.T) {
	p := newPod(t, forever, nil, nodetest.Config("idle_timeout = '4s'\n"))
	for _, client := range clients {
		p.silent(client, "sleep 1000")
		p.silent(client, "yes")
	}
}

// silent runs a program in a session that becomes silent, and waits for its end.
func (p *pod) silent(client client, program string) {
	to := &stalled{stop: make(chan struct{})}
	var session sync.WaitGroup
	session.Go(func() {
		_ = client(p.t, p.execURL(shell("touch /tmp/begun; exec "+program))).StreamWithContext(context.Background(), streams{Stdout: to, Stderr: io.Discard})
	})
	harness.Eventually(p.t, program+" is begun", func() bool { return p.run("ls", "/tmp") == "begun\n" })
	harness.Eventually(p.t, program+" is ended", func() bool { return !strings.Contains(p.run("ps", "-o", "args"), program+"\n") })
	close(to.stop)
	session.Wait()
	p.run("rm", "/tmp/begun")
}

// run gives what a command writes.
func (p *pod) run(command ...string) string {
	return string(nodetest.Call(p.t, p.Runtime.ExecSync, &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: command}).Stdout)
}

// stalled is a reader that takes nothing more after the first bytes.
type stalled struct{ stop chan struct{} }

func (s *stalled) Write(p []byte) (int, error) {
	<-s.stop
	return len(p), nil
}

// The user's certificate is served, and a new one after it was replaced, or one that the daemon makes.
func TestCertificate(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	authority := nodetest.Certificate(t, cert, key, time.Hour)
	p := newPod(t, forever, nil, nodetest.Config(fmt.Sprintf("tls_cert = '%s'\ntls_key = '%s'\n", cert, key)))
	for range 2 {
		p.wantSecret(func(t testing.TB, u *url.URL) remotecommand.Executor {
			e, err := remotecommand.NewSPDYExecutor(&rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: authority}}, http.MethodPost, u)
			check(t, err)
			return e
		})
		authority = nodetest.Certificate(t, cert, key, time.Hour)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	if conn, err := tls.Dial("tcp", p.relay, &tls.Config{RootCAs: pool, MaxVersion: tls.VersionTLS11}); err == nil {
		conn.Close()
		t.Error("TLS 1.1 is served")
	}
}

func TestSelfSigned(t *testing.T) {
	p := newPod(t, forever, nil, nodetest.Config("tls_self_signed = true\n"))
	for _, client := range clients {
		p.wantSecret(client)
	}
}

func (p *pod) wantSecret(client client) {
	var out bytes.Buffer
	u := p.execURL(shell("echo secret"))
	err := p.session(client, u, streams{Stdout: &out, Stderr: io.Discard})
	harness.Want(p.t, err == nil && out.String() == "secret\n" && (u.Scheme == "https" || u.Scheme == "wss"),
		"%s: %v, %q", u.Scheme, err, &out)
}

// The daemon's end ends its sessions at once, and their processes; the container continues.
//
// cri: AttachResponse.url ContainerConfig.stdin
func TestShutdown(t *testing.T) {
	p := newPod(t, forever, func(c *runtimeapi.ContainerConfig) { c.Stdin = true }, nodetest.Config("[limits]\nshutdown = '1h'\n"))
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	var sessions sync.WaitGroup
	for i := range 20 {
		request := shell("echo here; sleep 1000")
		request.Stdin = true
		in, typed := io.Pipe()
		defer typed.Close()
		var out safe
		u, want := p.execURL(request), "here\n"
		if i%4 == 0 {
			u, want = p.attachURL(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Stderr: true}), ""
		}
		e := []client{spdyClient, v5Client, v4Client}[i%3](p.t, u)
		sessions.Go(func() {
			_ = e.StreamWithContext(context.Background(), streams{Stdin: in, Stdout: &out, Stderr: io.Discard})
		})
		harness.Eventually(p.t, "the session has begun", func() bool { return out.String() == want })
	}
	for _, client := range forwardClients {
		data, _ := openPair(p.t, p.rawForward(client), 7, 0)
		_, err := data.Write([]byte("x"))
		check(p.t, err)
		_, err = io.ReadFull(data, make([]byte, 1))
		check(p.t, err)
	}
	p.Stop() // which would take the hour of its limit if it waited for a session
	sessions.Wait()
	p.Start()
	p.settle()
}

const (
	atOnce  = 4                     // how many clients there are at a time
	longest = 40 * time.Millisecond // how long a client stays, at most
)

// Clients of all kinds come and go away at random moments; then everything is as before they came: goroutines
// of the daemon, descriptors and processes of daemon, shim and container.
func TestAbortedCycles(t *testing.T) {
	total, err := strconv.Atoi(cmp.Or(os.Getenv("STREAM_CYCLES"), "400")) // which make test has
	check(t, err)
	p := newPod(t, "while read x; do echo $x; done", func(c *runtimeapi.ContainerConfig) { c.Stdin = true },
		nodetest.Config(fmt.Sprintf("max_open = %d\n", 10000+total))) // who never comes counts for a minute
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	p.runCycles(60) // what the first ones make stays, such as caches
	p.settle()
	before := p.least()
	for done := 0; done < total; done += 1000 {
		p.runCycles(min(total-done, 1000))
		t.Logf("%d cycles: %v", min(done+1000, total), p.holdings())
	}
	p.settle()
	after := p.least()
	defer func() {
		t.Logf("before: %v; after %d cycles: %v; children of the shim: %q", before, total, after, children(p.Supervisors()[0]))
	}()
	harness.Eventually(t, "all is as before", func() bool {
		p.settle()
		after = after.lower(p.holdings())
		return after.within(before)
	})
	p.noErrors()
}

// runCycles returns when all clients have gone.
func (p *pod) runCycles(count int) {
	kinds := []func(){func() { p.abortedForward(spdyForward) }, func() { p.abortedForward(tunnelForward) }}
	for _, c := range clients {
		kinds = append(kinds, func() { p.abortedExec(c) }, func() { p.abortedAttach(c) })
	}
	var next atomic.Int64
	var clients sync.WaitGroup
	for range atOnce {
		clients.Go(func() {
			for i := next.Add(1); i <= int64(count); i = next.Add(1) {
				kinds[i%int64(len(kinds))]()
			}
		})
	}
	clients.Wait()
}

var scripts = []string{"sleep 1000", "yes", "cat", "sleep 1000 & sleep 1000", "cat >/dev/null", "exit 3"}

func (p *pod) abortedExec(c client) {
	request := shell(scripts[rand.IntN(len(scripts))])
	request.Stdin = true
	p.aborted(c, p.execURL(request), bytes.NewReader(make([]byte, unread)))
}

func (p *pod) abortedAttach(c client) {
	u := p.attachURL(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Stderr: true})
	p.aborted(c, u, strings.NewReader(strings.Repeat("line\n", rand.IntN(100))))
}

func (p *pod) aborted(c client, u *url.URL, input io.Reader) {
	ctx, cancel := context.WithTimeout(context.Background(), rand.N(longest))
	defer cancel()
	in, typed := io.Pipe()
	defer typed.Close()
	_ = c(p.t, u).StreamWithContext(ctx, streams{Stdin: io.MultiReader(input, in), Stdout: io.Discard, Stderr: io.Discard})
}

func (p *pod) abortedForward(c forwardClient) {
	addresses, stop := p.forward(c, 7)
	for range rand.IntN(3) {
		conn, err := net.Dial("tcp", addresses[0])
		if err != nil {
			p.t.Error(err)
			break
		}
		defer conn.Close()
		go func() { _, _ = conn.Write(make([]byte, unread/8)) }()
	}
	time.Sleep(rand.N(longest))
	stop()
}

// holdings are what must not grow: goroutines and descriptors of the daemon, descriptors of the supervisor, and
// the children of both.
type holdings [4]int

func (h holdings) lower(other holdings) holdings {
	for i := range h {
		h[i] = min(h[i], other[i])
	}
	return h
}

// within: some goroutines serve the request for their number, and how many of them are counted is chance.
func (h holdings) within(other holdings) bool {
	other[0] += 2
	return h.lower(other) == h
}

func (p *pod) holdings() holdings {
	supervisor := p.Supervisors()[0]
	return holdings{p.goroutines(), descriptors(p.t, p.PID()), descriptors(p.t, supervisor), len(children(p.PID())) + len(children(supervisor))}
}

// least is the least that is held within a while, of each kind: what comes and goes with the daemon's own
// work does not count, nor what waits for Go's collector. Execs make it run.
func (p *pod) least() holdings {
	all := p.holdings()
	for range 100 {
		p.settle()
		all = all.lower(p.holdings())
	}
	return all
}

func descriptors(t testing.TB, pid int) int {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	check(t, err)
	return len(list)
}

// children describes the processes that have a parent: what each is, and in which cgroup.
func children(parent int) (list []string) {
	for _, one := range harness.Processes() {
		if one.Parent == parent {
			cgroups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", one.PID))
			list = append(list, fmt.Sprintf("%d %c %q started %d: %s", one.PID, one.State, one.Args, one.StartTime, cgroups))
		}
	}
	return list
}
