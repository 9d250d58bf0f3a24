package serve

import (
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
)

// TestListenerIsOverWithItsLastConnection connects to a supervisor that is about
// to end: it must not seem to serve.
func TestListenerIsOverWithItsLastConnection(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	inner, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer inner.Close()
	used := true
	l := newWatchedListener(inner, func() bool { return !used })
	accepted := make(chan net.Conn)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	}()
	dial := func() net.Conn {
		t.Helper()
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	for range 2 { // while there are containers, clients come and go
		client := dial()
		_ = (<-accepted).Close()
		_ = client.Close()
	}
	client := dial()
	served := <-accepted
	used = false
	if err := errors.Join(client.Close(), served.Close()); err != nil {
		t.Fatal(err)
	}
	late := dial()
	defer late.Close()
	if n, err := late.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("who came too late read %d, %v", n, err)
	}
}
