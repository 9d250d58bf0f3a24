package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// nodeLink is the name of a node's interface.
const nodeLink = "eth0"

// connect gives the node an interface on the hub's bridge, with its address and
// a default route: without one the kernel refuses what is sent to a Service's
// address before kube-proxy's rules see it.
func (n *node) connect() error {
	hub, err := netns.GetFromPid(n.cluster.Hub.PID)
	if err != nil {
		return fmt.Errorf("the hub's network namespace: %w", err)
	}
	defer hub.Close()
	inHub, err := netlink.NewHandleAt(hub, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer inHub.Close()
	bridge, err := inHub.LinkByName(hubBridge)
	if err != nil {
		return err
	}
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: n.hubLink(), MasterIndex: bridge.Attrs().Index},
		PeerName:  nodeLink, PeerNamespace: netlink.NsPid(n.Init.PID),
	}
	if err := inHub.LinkAdd(veth); err != nil {
		return fmt.Errorf("connect %s to the hub: %w", n.Name, err)
	}
	if err := inHub.LinkSetUp(veth); err != nil {
		return err
	}
	return n.inNetns(func(inNode *netlink.Handle) error {
		lo, err := inNode.LinkByName("lo")
		if err != nil {
			return err
		}
		link, err := inNode.LinkByName(nodeLink)
		if err != nil {
			return err
		}
		address, err := inNodeNetwork(n.Address)
		if err != nil {
			return err
		}
		if err := errors.Join(inNode.LinkSetUp(lo), inNode.AddrAdd(link, address), inNode.LinkSetUp(link)); err != nil {
			return err
		}
		return inNode.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(hubAddress)})
	})
}

func (n *node) inNetns(do func(*netlink.Handle) error) error {
	namespace, err := netns.GetFromPid(n.Init.PID)
	if err != nil {
		return fmt.Errorf("the network namespace of %s: %w", n.Name, err)
	}
	defer namespace.Close()
	handle, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()
	return do(handle)
}

// routePods gives every node a route to the pods of each other one.
func (c *cluster) routePods() error {
	for _, from := range c.Nodes {
		err := from.inNetns(func(handle *netlink.Handle) error {
			for _, to := range c.Nodes {
				if to == from || to.PodCIDR == "" {
					continue
				}
				_, destination, err := net.ParseCIDR(to.PodCIDR)
				if err != nil {
					return err
				}
				if err := handle.RouteReplace(&netlink.Route{Dst: destination, Gw: net.ParseIP(to.Address)}); err != nil {
					return fmt.Errorf("a route from %s to the pods of %s: %w", from.Name, to.Name, err)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unroute removes the other nodes' routes to the pods of one.
func (c *cluster) unroute(gone *node) error {
	_, destination, err := net.ParseCIDR(gone.PodCIDR)
	if err != nil {
		return err
	}
	for _, n := range c.Nodes {
		err := n.inNetns(func(handle *netlink.Handle) error {
			return handle.RouteDel(&netlink.Route{Dst: destination})
		})
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

// setNodeSysctls sets what kubeadm asks of a node's network; it is of the
// calling thread's network namespace.
func setNodeSysctls() error {
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		err := os.WriteFile("/proc/sys/"+name, []byte("1"), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// hubLink is the name of the node's link on the hub's bridge.
func (n *node) hubLink() string {
	return "node-" + n.Address[strings.LastIndex(n.Address, ".")+1:]
}
