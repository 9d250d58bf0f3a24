package stream

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"net/url"
	"testing"

	"golang.org/x/net/websocket"

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
