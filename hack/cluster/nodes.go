package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
)

// addNode joins another node.
func (c *cluster) addNode(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	if _, err := c.node(name); err == nil {
		return fmt.Errorf("the cluster %s has a node %s", c.Name, name)
	}
	b, err := c.build(ctx)
	if err != nil {
		return err
	}
	n := &node{Name: name, Address: c.freeAddress(), cluster: c}
	if n.Address == "" {
		return fmt.Errorf("the cluster %s has %d nodes, that is the most", c.Name, len(c.Nodes))
	}
	c.Nodes = append(c.Nodes, n)
	if err := c.startNodes(ctx, b, []*node{n}); err != nil {
		return err
	}
	if err := n.join(ctx); err != nil {
		return err
	}
	c.progress.did("kubeadm join on %s", name)
	return c.awaitReady(ctx)
}

func (c *cluster) freeAddress() string {
	for i := range maxNodes {
		taken := slices.ContainsFunc(c.Nodes, func(n *node) bool { return n.Address == nodeAddress(i) })
		if !taken {
			return nodeAddress(i)
		}
	}
	return ""
}

// removeNode drains a node, takes it out of the cluster and ends it.
func (c *cluster) removeNode(ctx context.Context, n *node) error {
	if n.isControlPlane() {
		return fmt.Errorf("%s has the control plane: cluster --name %s down ends all", n.Name, c.Name)
	}
	if _, err := output(c.kubectl(ctx, "drain", n.Name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=2m")); err != nil {
		return err
	}
	c.progress.did("drained %s", n.Name)
	if _, err := output(c.kubectl(ctx, "delete", "node", n.Name)); err != nil {
		return err
	}
	leaks := n.emptyAndLook(ctx)
	c.Nodes = slices.DeleteFunc(c.Nodes, func(other *node) bool { return other == n })
	err := errors.Join(leaks, n.remove(), c.unroute(n), c.save())
	c.progress.did("%s is gone", n.Name)
	return err
}

// restartNode ends the runtime and the kubelet with SIGTERM. Pods stay.
func (c *cluster) restartNode(ctx context.Context, n *node) error {
	for _, service := range []string{"kubelet", c.Runtime} {
		if err := n.endService(ctx, service); err != nil {
			return err
		}
	}
	if err := n.awaitRuntime(ctx); err != nil {
		return err
	}
	c.progress.did("restarted %s and the kubelet of %s", c.Runtime, n.Name)
	return c.awaitReady(ctx)
}

// rebootNode cuts a node's power and starts it again with the same disk.
func (c *cluster) rebootNode(ctx context.Context, n *node) error {
	if err := n.cut(); err != nil {
		return err
	}
	if err := n.removeCgroup(); err != nil {
		return err
	}
	if err := n.disconnect(); err != nil {
		return err
	}
	c.progress.did("%s is without power", n.Name)
	if err := n.power(); err != nil {
		return err
	}
	if err := n.awaitRuntime(ctx); err != nil {
		return err
	}
	if err := c.routePods(); err != nil {
		return err
	}
	c.progress.did("%s runs again", n.Name)
	return c.awaitReady(ctx)
}

// disconnect removes the node's link from the hub, if the kernel, which does that
// some time after the last process of a network namespace, has not yet.
func (n *node) disconnect() error {
	hub, err := netns.GetFromPid(n.cluster.Hub.PID)
	if err != nil {
		return err
	}
	defer hub.Close()
	handle, err := netlink.NewHandleAt(hub, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()
	link, err := handle.LinkByName(n.hubLink())
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := handle.LinkDel(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// removeCgroup removes the node's cgroup and all below it.
func (n *node) removeCgroup() error {
	hierarchies, err := cgroup.FindHierarchies()
	if err != nil {
		return err
	}
	return hierarchies.Remove(n.cgroup(), killTime)
}

// remove ends the node and removes its disk.
func (n *node) remove() error {
	if err := n.cut(); err != nil {
		return err
	}
	return errors.Join(n.removeCgroup(), os.RemoveAll(n.dir()))
}
