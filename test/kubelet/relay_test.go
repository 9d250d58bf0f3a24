package kubelet

import (
	"io"
	"net"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// relay leads from the test's network namespace to an address in the node's,
// and returns where: clients dial as they like.
func relay(t testing.TB, n *harness.Node, server string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // closed
			}
			go serve(n, client, server)
		}
	}()
	return listener.Addr().String()
}

func serve(n *harness.Node, client net.Conn, server string) {
	conn, err := dial(n, server)
	if err != nil {
		client.Close()
		return
	}
	go join(conn, client)
	join(client, conn)
}

// dial connects from inside the node's network namespace.
func dial(n *harness.Node, address string) (conn net.Conn, err error) {
	n.RunInNetns(func() error {
		conn, err = net.Dial("tcp", address)
		return nil
	})
	return conn, err
}

func join(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		from.Close()
		return
	}
	to.(*net.TCPConn).CloseWrite()
}
