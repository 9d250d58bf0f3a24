package stream

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/net/websocket"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/minicri/minicri/stream/spdy"
	"github.com/minicri/minicri/test/harness"
)

// discarding is a sink that notes no more than how much has come.
type discarding struct{ bytes int }

func (d *discarding) Write(p []byte) (int, error) { d.bytes += len(p); return len(p), nil }
func (d *discarding) CloseWrite()                 {}
func (d *discarding) Abort()                      {}

// pipeWriter is an http.ResponseWriter whose connection is taken over.
type pipeWriter struct {
	http.ResponseWriter
	conn net.Conn
}

func (w pipeWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return w.conn, bufio.NewReadWriter(bufio.NewReader(w.conn), bufio.NewWriter(w.conn)), nil
}

// FuzzWebSocket: a client that writes anything ends its own connection at most,
// and no more reaches a sink than it has sent.
func FuzzWebSocket(f *testing.F) {
	f.Add([]byte{0x82, 0x82, 0, 0, 0, 0, 0, 'x'}, false)                                      // a message for channel 0
	f.Add([]byte{0x02, 0x81, 0, 0, 0, 0, 0, 0x80, 0x81, 0, 0, 0, 0, 'y'}, true)               // in two frames
	f.Add([]byte{0x82, 0x82, 0, 0, 0, 0, 255, 9}, false)                                      // close of a channel that is not there
	f.Add([]byte{0x82, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0}, false) // of 2^63 bytes
	f.Add([]byte{0x89, 0xfe, 0xff, 0xff}, false)                                              // a ping of 64 KiB
	f.Fuzz(func(t *testing.T, sent []byte, base64 bool) {
		client, server := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, client) }() // until client is closed
		go func() {
			_, _ = io.Copy(client, bytes.NewReader(sent))
			_ = client.Close()
		}()
		took := &discarding{}
		c := &channels{sinks: []spdy.Sink{took, nil, nil}, protocol: channelProtocol{halfClose: true, base64: base64}}
		request := &http.Request{Method: http.MethodGet, Host: "x", URL: &url.URL{Path: "/"}, Header: http.Header{
			"Upgrade": {"websocket"}, "Connection": {"Upgrade"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="},
		}}
		serve := func(ws *websocket.Conn) {
			c.ws = ws
			c.serve()
		}
		websocket.Server{Handler: serve}.ServeHTTP(pipeWriter{conn: server}, request)
		harness.Want(t, took.bytes <= len(sent), "%d bytes from %d", took.bytes, len(sent))
		_ = server.Close()
	})
}

// A token is good for one use and one minute, and makes room for another then.
func TestTokenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRequests(1)
		token, err := r.add(request{kind: kindExec})
		harness.Check(t, err)
		time.Sleep(tokenLife - time.Second)
		_, err = r.add(request{})
		harness.Want(t, errors.Is(err, errdefs.ErrResourceExhausted), "a second request of one: %v", err)
		time.Sleep(2 * time.Second)
		_, found := r.take(token)
		harness.Want(t, !found, "a token works after its time")
		token, err = r.add(request{kind: kindAttach})
		harness.Want(t, err == nil, "an expired request still counts: %v", err)
		got, found := r.take(token)
		harness.Want(t, found && got.kind == kindAttach, "the token stands for %v", got)
		_, found = r.take(token)
		harness.Want(t, !found, "a token has to work once")
		_, err = r.add(request{})
		harness.Want(t, errors.Is(err, errdefs.ErrResourceExhausted), "a second session of one: %v", err)
		r.end()
		r.close()
		_, err = r.add(request{})
		harness.Want(t, errors.Is(err, errdefs.ErrUnavailable), "after the end: %v", err)
	})
}

// attack: clients: a session with a terminal sends sizes as fast as it can
// held: only the last size that has arrived is set
// field: containerd and CRI-O decode and set every one
func TestLastSize(t *testing.T) {
	for text, want := range harness.Sorted(map[string]struct {
		size *remotecommand.TerminalSize
		rest string
	}{
		``:                                {nil, ""},
		`{"Width":80,"Height":24}` + "\n": {&remotecommand.TerminalSize{Width: 80, Height: 24}, "\n"},
		`{"Width":1,"Height":2}{"Width":3,"Height":4`: {&remotecommand.TerminalSize{Width: 1, Height: 2}, `{"Width":3,"Height":4`},
		`"Height":9}{"Width":3,"Height":4}`:           {&remotecommand.TerminalSize{Width: 3, Height: 4}, ""},
		`no size}`:                                    {nil, ""},
		`{"Width":"wide"}{`:                           {nil, "{"},
		`{"Width":70000}`:                             {nil, ""},
	}) {
		size, rest := lastSize([]byte(text))
		harness.Want(t, fmt.Sprint(size) == fmt.Sprint(want.size) && string(rest) == want.rest,
			"%q: %v and %q, want %v and %q", text, size, rest, want.size, want.rest)
	}
	_, rest := lastSize(make([]byte, 1<<20))
	harness.Want(t, len(rest) == largestSize, "%d bytes are kept", len(rest))
}
