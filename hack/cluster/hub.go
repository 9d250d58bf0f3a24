package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The network between the nodes. It exists in namespaces only, so that every
// cluster has the same addresses.
const (
	hubBridge   = "nodes"
	hubAddress  = "172.30.0.1"
	nodeNetwork = "172.30.0.0/24"
	firstNode   = 11 // the last number of the first node's address
	apiPort     = "6443"
	podSubnet   = "10.244.0.0/16"
	serviceNet  = "10.96.0.0/16"
)

// inherited is the descriptor of what a process of ours gets from its starter.
const inherited = 3

// startHub starts the hub with a listening socket of the machine's loopback. A
// socket stays in the network namespace that it was made in, so the hub, in a
// namespace of its own, is reached by it and reaches the nodes.
func (c *cluster) startHub() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	socket, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer socket.Close()
	ready, readyIn, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	command, err := c.background("hub.log", hubRole, c.dir())
	if err != nil {
		return err
	}
	command.ExtraFiles = []*os.File{socket, readyIn}
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Setsid: true}
	err = command.Start()
	readyIn.Close()
	if err != nil {
		return fmt.Errorf("start the hub: %w", err)
	}
	if c.Hub, err = factsOf(command.Process.Pid); err != nil {
		return err
	}
	c.Port = listener.Addr().(*net.TCPAddr).Port
	if n, _ := ready.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("the hub ended, see %s", c.path("hub.log"))
	}
	return c.save()
}

// background is this program in another role, with a file for what it says.
func (c *cluster) background(log string, arguments ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	file, err := os.OpenFile(c.path(log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	command := exec.Command(self, arguments...)
	command.Dir, command.Env = "/", []string{"PATH=" + os.Getenv("PATH")}
	command.Stdout, command.Stderr = file, file
	return command, nil
}

// serveHub makes the bridge between the nodes and relays the API server's port,
// until it is killed.
func serveHub(dir string) error {
	listener, err := net.FileListener(os.NewFile(inherited, "listener"))
	if err != nil {
		return err
	}
	if err := makeBridge(); err != nil {
		return fmt.Errorf("%s: the bridge between the nodes: %w", filepath.Base(dir), err)
	}
	ready := os.NewFile(inherited+1, "ready")
	ready.Write([]byte{1}) // who waits sees a hub that ended instead
	ready.Close()
	for {
		client, err := listener.Accept()
		if err != nil {
			return err
		}
		go relay(client, net.JoinHostPort(nodeAddress(0), apiPort))
	}
}

func makeBridge() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: hubBridge}}
	if err := netlink.LinkAdd(bridge); err != nil {
		return err
	}
	address, err := inNodeNetwork(hubAddress)
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(bridge, address), netlink.LinkSetUp(bridge), netlink.LinkSetUp(lo))
}

// relay copies between a client and a server until both have no more to say.
func relay(client net.Conn, address string) {
	defer client.Close()
	server, err := net.Dial("tcp", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, "hub:", err)
		return
	}
	defer server.Close()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		both.Go(func() {
			io.Copy(way[1], way[0]) // a broken connection ends like a closed one
			way[1].(*net.TCPConn).CloseWrite()
		})
	}
	both.Wait()
}

// nodeAddress is the address of the n-th node that the cluster ever had.
func nodeAddress(n int) string {
	return netip.AddrFrom4([4]byte{172, 30, 0, byte(firstNode + n)}).String()
}

func inNodeNetwork(address string) (*netlink.Addr, error) {
	network := netip.MustParsePrefix(nodeNetwork)
	return netlink.ParseAddr(fmt.Sprintf("%s/%d", address, network.Bits()))
}
