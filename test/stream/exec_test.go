package stream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

const forever = "while true; do sleep 0.1; done"

// An output that no one asked for does not stop the process.
//
// cri: Exec ExecRequest.stderr
func TestExec(t *testing.T) {
	p := newPod(t, forever, nil)
	for name, client := range clients {
		var out, errs bytes.Buffer
		e := client(t, p.execURL(shell("echo out; echo err >&2; exit 42")))
		err := e.StreamWithContext(limited(t), remotecommand.StreamOptions{Stdout: &out, Stderr: &errs})
		var exit utilexec.CodeExitError
		if !errors.As(err, &exit) || exit.Code != 42 {
			t.Errorf("%s: %v, want exit code 42", name, err)
		}
		if out.String() != "out\n" || errs.String() != "err\n" {
			t.Errorf("%s: stdout %q, stderr %q", name, &out, &errs)
		}
		e = client(t, p.execURL(&runtimeapi.ExecRequest{Cmd: []string{"/no/such"}, Stdout: true}))
		if err := e.StreamWithContext(limited(t), remotecommand.StreamOptions{Stdout: io.Discard}); err == nil {
			t.Errorf("%s: a program that does not exist: no error", name)
		}
		errs.Reset()
		e = client(t, p.execURL(&runtimeapi.ExecRequest{Cmd: []string{"sh", "-c", "seq 100000; echo err >&2"}, Stderr: true}))
		if err := e.StreamWithContext(limited(t), remotecommand.StreamOptions{Stderr: &errs}); err != nil || errs.String() != "err\n" {
			t.Errorf("%s: stderr alone: %v, %q", name, err, &errs)
		}
	}
}

// Bytes go in and come out, and are as they were, also when there are many
// more than any buffer holds; then comes the exit code.
//
// cri: ExecRequest.stdin
func TestExecBytes(t *testing.T) {
	p := newPod(t, forever, nil)
	for _, of := range []struct {
		name   string
		client client
		size   int64
	}{{"SPDY", spdyClient, 500 << 20}, {"WebSocket v5", v5Client, 64 << 20}} {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		began := time.Now()
		sent, received := sha256.New(), sha256.New()
		request := shell("cat; exit 7")
		request.Stdin = true
		// No WriterTo: the client takes its chunks as from a file.
		data := struct{ io.Reader }{io.LimitReader(rand.NewChaCha8([32]byte{1}), of.size)}
		err := of.client(t, p.execURL(request)).StreamWithContext(ctx, remotecommand.StreamOptions{
			Stdin: io.TeeReader(data, sent), Stdout: received, Stderr: io.Discard,
		})
		var exit utilexec.CodeExitError
		if !errors.As(err, &exit) || exit.Code != 7 {
			t.Errorf("%s: %v, want exit code 7", of.name, err)
		}
		if !bytes.Equal(sent.Sum(nil), received.Sum(nil)) {
			t.Errorf("%s: other bytes", of.name)
		}
		t.Logf("%s: %d MiB in and out, half-closed stdin, in %v", of.name, of.size>>20, time.Since(began))
	}
}

func hash(data []byte) []byte {
	sum := sha256.Sum256(data)
	return sum[:]
}

// cri: ExecRequest.tty
func TestExecTerminal(t *testing.T) {
	p := newPod(t, forever, nil)
	for name, client := range clients {
		request := &runtimeapi.ExecRequest{
			Cmd: []string{"sh", "-c", "until stty size | grep -q '33 77'; do sleep 0.02; done; stty size; read x; echo got $x"}, Stdin: true, Stdout: true, Tty: true,
		}
		var out bytes.Buffer
		// Open until the end: a client that closes its stdin is another test.
		in, typed := io.Pipe()
		go func() { _, _ = io.WriteString(typed, "typed\n") }()
		err := client(t, p.execURL(request)).StreamWithContext(limited(t), remotecommand.StreamOptions{
			Stdin: in, Stdout: &out, Tty: true, TerminalSizeQueue: &sizes{{Width: 80, Height: 24}, {Width: 77, Height: 33}},
		})
		typed.Close()
		if err != nil || !strings.Contains(out.String(), "33 77\r\n") || !strings.Contains(out.String(), "got typed\r\n") {
			t.Errorf("%s: %v, %q", name, err, &out)
		}
	}
}

type sizes []remotecommand.TerminalSize

func (s *sizes) Next() *remotecommand.TerminalSize {
	if len(*s) == 0 {
		return nil
	}
	first := (*s)[0]
	*s = (*s)[1:]
	return &first
}

// cri: AttachRequest.container_id
func TestBadRequests(t *testing.T) {
	p := newPod(t, forever, nil)
	for field, r := range map[string]*runtimeapi.ExecRequest{
		"stderr":                {ContainerId: p.container, Cmd: []string{"true"}, Tty: true, Stderr: true},
		"stdin, stdout, stderr": {ContainerId: p.container, Cmd: []string{"true"}},
		"cmd":                   {ContainerId: p.container, Stdout: true},
		"container id":          {Cmd: []string{"true"}, Stdout: true},
	} {
		_, err := p.Runtime.Exec(limited(t), r)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	_, err := p.Runtime.Attach(limited(t), &runtimeapi.AttachRequest{ContainerId: p.container, Stdout: true, Tty: true})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "tty") {
		t.Errorf("a terminal that is none: %v", err)
	}
	_, err = p.Runtime.PortForward(limited(t), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: []int32{0}})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "port") {
		t.Errorf("port 0: %v", err)
	}
}

// cri: ExecRequest.container_id
func TestTokens(t *testing.T) {
	p := newPod(t, forever, nil, harness.Config("max_open = 3\n"))
	u := p.execURL(shell("echo once"))
	var out bytes.Buffer
	check(t, spdyClient(t, u).StreamWithContext(limited(t), remotecommand.StreamOptions{Stdout: &out, Stderr: io.Discard}))
	if err := spdyClient(t, u).StreamWithContext(limited(t), remotecommand.StreamOptions{Stdout: &out, Stderr: io.Discard}); err == nil || out.String() != "once\n" {
		t.Errorf("a token worked twice: %v, %q", err, &out)
	}
	for _, path := range []string{"/", "/exec", "/exec/", "/exec/x", "/metrics"} {
		answer, err := http.Get("http://" + p.relay + path)
		check(t, err)
		answer.Body.Close()
		if answer.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %s", path, answer.Status)
		}
	}
	token := u.Path[strings.LastIndex(u.Path, "/")+1:]
	if len(token) < 20 || strings.Contains(p.Log(), token) {
		t.Errorf("token %q is short or in the log", token)
	}
	var err error
	for range 4 {
		r := shell("true")
		r.ContainerId = p.container
		_, err = p.Runtime.Exec(limited(t), r)
	}
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the fourth of three requests: %v", err)
	}
}

func TestSelfSigned(t *testing.T) {
	p := newPod(t, forever, nil, harness.Config("tls_self_signed = true\n"))
	for name, client := range clients {
		var out bytes.Buffer
		u := p.execURL(shell("echo secret"))
		if u.Scheme != "https" && u.Scheme != "wss" {
			t.Errorf("%s: URL %s", name, u)
		}
		err := client(t, u).StreamWithContext(limited(t), remotecommand.StreamOptions{Stdout: &out, Stderr: io.Discard})
		if err != nil || out.String() != "secret\n" {
			t.Errorf("%s: %v, %q", name, err, &out)
		}
	}
}

// unread is more than a process's pipe holds, and less than the sockets on the
// way do: with those full, a client's end does not arrive either.
const unread = 128 << 10

// settle waits until the container has its own processes only.
func (p *pod) settle() {
	p.t.Helper()
	text := ""
	defer func() {
		if p.t.Failed() {
			p.t.Logf("left are: %s", text)
		}
	}()
	eventually(p.t, "the processes of aborted clients are gone", func() bool {
		answer, err := p.Runtime.ExecSync(limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: []string{"ps", "-o", "args"}})
		check(p.t, err)
		text = string(answer.Stdout)
		return !strings.Contains(text, "sleep 1000") && !strings.Contains(text, "cat") && !strings.Contains(text, "yes")
	})
}
