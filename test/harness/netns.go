package harness

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// makeNetns makes the node's network namespace, loopback up. It has no name, so
// it ends with the test's process: an open descriptor holds it.
func (n *Node) makeNetns() {
	n.t.Helper()
	err := onThreadOfItsOwn(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		var err error
		if n.netns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	n.must("making the network namespace", err)
}

// RunInNetns calls do on a thread that is in the node's network namespace.
// Programs that do starts are in there too, goroutines that it starts are not.
// An error of do fails the test; do itself must not, as it runs on another
// goroutine.
func (n *Node) RunInNetns(do func() error) {
	n.t.Helper()
	if err := n.inNetns(do); err != nil {
		n.t.Fatalf("node %s: in its network namespace: %v", n.Network, err)
	}
}

func (n *Node) inNetns(do func() error) error {
	return onThreadOfItsOwn(func() error {
		if err := unix.Setns(int(n.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("setns: %w", err)
		}
		return do()
	})
}

// Listen listens in the node's network namespace until the test ends.
func (n *Node) Listen(address string) (listener net.Listener) {
	n.t.Helper()
	n.RunInNetns(func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	})
	n.t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// Dial connects from inside the node's network namespace.
func (n *Node) Dial(address string) (conn net.Conn, err error) {
	n.RunInNetns(func() error {
		conn, err = net.DialTimeout("tcp", address, settleTime)
		return nil
	})
	return conn, err
}

// Relay leads from the test's network namespace to an address in the node's, until the
// test ends, and returns where: clients dial as they like.
func (n *Node) Relay(server string) (address string) {
	n.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	n.must("listening for a relay", err)
	n.t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // closed
			}
			conn, err := n.Dial(server)
			if err != nil {
				_ = client.Close()
				continue
			}
			go join(conn, client)
			go join(client, conn)
		}
	}()
	return listener.Addr().String()
}

func join(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		_, _ = to.Close(), from.Close()
		return
	}
	_ = to.(*net.TCPConn).CloseWrite()
}

// ServeInPod listens in the network namespace of a pod, and has serve answer each
// connection, which is closed when that returns. The test's end closes the listener.
func (n *Node) ServeInPod(pod, network, address string, serve func(*net.TCPConn)) {
	n.t.Helper()
	pins, err := filepath.Glob(filepath.Join(n.Netns, "*"+pod))
	if err != nil || len(pins) != 1 {
		n.t.Fatalf("network namespaces of pod %s: %q, %v; want one", pod, pins, err)
	}
	var listener net.Listener
	n.RunInNetns(func() error {
		netns, err := os.Open(pins[0])
		if err != nil {
			return err
		}
		defer netns.Close()
		if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		listener, err = net.Listen(network, address)
		return err
	})
	n.t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn.(*net.TCPConn))
			}()
		}
	}()
}

// onThreadOfItsOwn calls do on a thread that ends afterwards, with all that do
// changed about it. The main thread of a process never ends: a goroutine that
// got it holds it while another one, on another thread then, does the work.
func onThreadOfItsOwn(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- onThreadOfItsOwn(do)
			return
		}
		done <- do()
	}()
	return <-done
}
