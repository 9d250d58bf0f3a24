package spdy

import (
	"bytes"
	"io"
	"net"
	"testing"
)

// FuzzConn: a client that writes anything ends its own connection at most.
func FuzzConn(f *testing.F) {
	f.Add([]byte{0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1})                    // ping
	f.Add([]byte{0x80, 3, 0, 1, 0, 0, 0, 10, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0}) // a stream without headers
	f.Add([]byte{0, 0, 0, 1, 0, 0xff, 0xff, 0xff, 'x'})                     // 16 MiB of data
	f.Add([]byte{0x80, 3, 0, 4, 0, 0xff, 0xff, 0xff})                       // 16 MiB of settings
	f.Add([]byte{0x80, 2, 0, 1, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, sent []byte) {
		client, server := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, client) }() // until client is closed
		conn := NewConn(server, func(s *Stream) (Sink, error) { return nil, s.Reply() })
		go func() {
			_, _ = io.Copy(client, bytes.NewReader(sent))
			_ = client.Close()
		}()
		_ = conn.Serve()
		_ = conn.Close()
		_ = client.Close()
	})
}
