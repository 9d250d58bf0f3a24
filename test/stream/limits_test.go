package stream

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A session that is silent ends, and its process with it, also when the client
// has stopped to read.
func TestIdleTimeout(t *testing.T) {
	p := newPod(t, forever, nil, harness.Config("idle_timeout = '4s'\n"))
	for _, client := range clients {
		p.silent(client, "sleep 1000")
		p.silent(client, "yes")
	}
}

// silent runs a program in a session that becomes silent, and waits for its
// end.
func (p *pod) silent(client client, program string) {
	p.t.Helper()
	to := &stalled{stop: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = client(p.t, p.execURL(shell("touch /tmp/begun; exec "+program))).StreamWithContext(context.Background(), remotecommand.StreamOptions{Stdout: to, Stderr: io.Discard})
	}()
	eventually(p.t, program+" is begun", func() bool { return p.run("ls", "/tmp") == "begun\n" })
	eventually(p.t, program+" is ended", func() bool { return !strings.Contains(p.run("ps", "-o", "args"), program+"\n") })
	close(to.stop)
	select {
	case <-ended:
	case <-time.After(patience):
		p.t.Fatalf("%s: the client is not told", program)
	}
	p.run("rm", "/tmp/begun")
}

// run gives what a command writes.
func (p *pod) run(command ...string) string {
	p.t.Helper()
	answer, err := p.Runtime.ExecSync(limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: command})
	check(p.t, err)
	return string(answer.Stdout)
}

// stalled is a reader that takes nothing more after the first bytes.
type stalled struct{ stop chan struct{} }

func (s *stalled) Write(p []byte) (int, error) {
	<-s.stop
	return len(p), nil
}

// The user's certificate is served, and a new one after it was replaced.
func TestCertificate(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	authority := writeCertificate(t, cert, key)
	p := newPod(t, forever, nil, harness.Config(fmt.Sprintf("tls_cert = '%s'\ntls_key = '%s'\n", cert, key)))
	for range 2 {
		var out bytes.Buffer
		u := p.execURL(shell("echo secret"))
		config := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: authority}}
		e, err := remotecommand.NewSPDYExecutor(config, http.MethodPost, u)
		check(t, err)
		if err := e.StreamWithContext(limited(t), remotecommand.StreamOptions{Stdout: &out, Stderr: io.Discard}); err != nil || out.String() != "secret\n" {
			t.Errorf("%s: %v, %q", u.Scheme, err, &out)
		}
		authority = writeCertificate(t, cert, key)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	conn, err := tls.Dial("tcp", p.relay, &tls.Config{RootCAs: pool, MaxVersion: tls.VersionTLS11})
	if err == nil {
		conn.Close()
		t.Error("TLS 1.1 is served")
	}
}

// writeCertificate makes one that is its own authority.
func writeCertificate(t testing.TB, cert, key string) (authority []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	check(t, err)
	serial, err := cryptorand.Int(cryptorand.Reader, big.NewInt(1<<60))
	check(t, err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "node " + serial.String()}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(cryptorand.Reader, template, template, private.Public(), private)
	check(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	check(t, err)
	authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	check(t, os.WriteFile(cert, authority, 0o600))
	check(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
	return authority
}

// Clients that do not read hold up no one else, and the daemon keeps little for
// them.
//
// cri: ExecRequest.cmd ExecRequest.stdout
func TestSlowReaders(t *testing.T) {
	p := newPod(t, forever, nil)
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", func(conn *net.TCPConn) {
		for err := error(nil); err == nil; {
			_, err = conn.Write(make([]byte, 1<<20))
		}
	})
	before := p.memory()
	ctx, leave := context.WithCancel(context.Background())
	ended := make(chan error)
	stop := make(chan struct{})
	const slow = 8 // of each kind
	for range slow {
		for _, client := range clients {
			go func() {
				ended <- client(t, p.execURL(shell("yes"))).StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &stalled{stop}, Stderr: io.Discard})
			}()
		}
		for _, client := range forwardClients {
			data, _ := openPair(t, p.rawForward(client), 7, 0)
			_, err := io.ReadFull(data, make([]byte, 1000))
			check(t, err)
		}
	}
	const size = 8 << 20
	for name, client := range clients {
		var out safe
		request := &runtimeapi.ExecRequest{Cmd: []string{"head", "-c", strconv.Itoa(size), "/dev/zero"}, Stdout: true}
		err := client(t, p.execURL(request)).StreamWithContext(limited(t), remotecommand.StreamOptions{Stdout: &out})
		if err != nil || out.String() != strings.Repeat("\x00", size) {
			t.Errorf("%s beside slow ones: %v, %d bytes", name, err, len(out.String()))
		}
	}
	after := p.memory()
	t.Logf("resident memory of the daemon: %d KiB, with %d slow readers and after some traffic %d KiB", before, 5*slow, after)
	// A session over SPDY costs most, because of the library's compressor.
	if each := (after - before) / (5 * slow); each > 2048 {
		t.Errorf("each slow reader costs %d KiB", each)
	}
	leave()
	close(stop)
	for range slow * len(clients) {
		<-ended
	}
}

// memory is the daemon's resident memory in KiB.
func (p *pod) memory() int {
	p.t.Helper()
	return harness.ProcKiB(p.t, p.PID(), "VmRSS")
}

// The daemon's end ends its sessions at once, and their processes; the
// container continues.
//
// cri: AttachResponse.url ContainerConfig.stdin
func TestShutdown(t *testing.T) {
	p := newPod(t, forever, func(c *runtimeapi.ContainerConfig) { c.Stdin = true })
	p.ServeInPod(p.id, "tcp", "127.0.0.1:7", echo)
	// A busy machine may be slow once. What waits for a limit is so each time.
	took := time.Hour
	for try := 0; try < 4 && took > shutdownTime; try++ {
		took = p.stopWithSessions()
		p.Start()
		p.settle()
	}
	if took > shutdownTime {
		t.Errorf("the daemon took %v to end", took)
	}
}

const (
	shutdownTime     = 5 * time.Second // half of the limit that the daemon has for it
	shutdownSessions = 20
)

// stopWithSessions opens sessions of all kinds and ends the daemon.
func (p *pod) stopWithSessions() (took time.Duration) {
	p.t.Helper()
	var sessions sync.WaitGroup
	for i := range shutdownSessions {
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
			_ = e.StreamWithContext(context.Background(), remotecommand.StreamOptions{Stdin: in, Stdout: &out, Stderr: io.Discard})
		})
		eventually(p.t, "the session has begun", func() bool { return out.String() == want })
	}
	for _, client := range forwardClients {
		data, _ := openPair(p.t, p.rawForward(client), 7, 0)
		_, err := data.Write([]byte("x"))
		check(p.t, err)
		_, err = io.ReadFull(data, make([]byte, 1))
		check(p.t, err)
	}
	began := time.Now()
	p.Stop()
	took = time.Since(began)
	p.t.Logf("the daemon ended within %v of SIGTERM, with %d sessions", took, shutdownSessions+len(forwardClients))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sessions.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		p.t.Fatal("a client does not see the end")
	}
	return took
}
