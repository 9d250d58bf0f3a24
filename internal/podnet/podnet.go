// Package podnet looks at the network of a pod as it is: the interfaces in its
// namespace, their other ends on the node, its routes, and the rules of the
// node's packet filter that belong to it. It changes nothing and keeps no state.
package podnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/timeline"
)

// Look looks at the network namespace at a path, and at the node's rules in which
// one of the addresses or the pod's id appears. What cannot be looked at is in
// the answer's Problem.
func Look(ctx context.Context, path, id string, addresses []string) *timeline.Now {
	now := &timeline.Now{}
	err := look(now, path)
	rules, rulesErr := Rules(ctx, id, addresses)
	now.Rules = rules
	if err := errors.Join(err, rulesErr); err != nil {
		now.Problem = err.Error()
	}
	return now
}

func look(now *timeline.Now, path string) error {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("open the network namespace %s: %w", path, err)
	}
	defer ns.Close()
	inside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("look into the network namespace %s: %w", path, err)
	}
	defer inside.Close()
	links, err := inside.LinkList()
	if err != nil {
		return fmt.Errorf("list the interfaces of %s: %w", path, err)
	}
	names := make(map[int]string)
	for _, link := range links {
		names[link.Attrs().Index] = link.Attrs().Name
		described, err := describe(inside, link)
		if err != nil {
			return err
		}
		now.Interfaces = append(now.Interfaces, described)
	}
	now.Routes, err = routes(inside, names)
	return err
}

func describe(inside *netlink.Handle, link netlink.Link) (timeline.Interface, error) {
	attributes := link.Attrs()
	i := timeline.Interface{
		Name: attributes.Name, Kind: link.Type(), Up: attributes.Flags&net.FlagUp != 0, MTU: attributes.MTU, MAC: attributes.HardwareAddr.String(),
	}
	addresses, err := inside.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return i, fmt.Errorf("list the addresses of %s: %w", i.Name, err)
	}
	for _, address := range addresses {
		i.Addresses = append(i.Addresses, address.IPNet.String())
	}
	if link.Type() == "veth" {
		i.Peer = peer(attributes)
	}
	return i, nil
}

// peer is the other end of a veth pair on the node: its index there is the
// link's parent here.
func peer(attributes *netlink.LinkAttrs) string {
	other, err := netlink.LinkByIndex(attributes.ParentIndex)
	if err != nil || other.Type() != "veth" {
		return ""
	}
	text := other.Attrs().Name
	if other.Attrs().Flags&net.FlagUp == 0 {
		text += " (down)"
	}
	if master, err := netlink.LinkByIndex(other.Attrs().MasterIndex); err == nil && other.Attrs().MasterIndex > 0 {
		text += " in " + master.Type() + " " + master.Attrs().Name
	}
	return text
}

func routes(inside *netlink.Handle, names map[int]string) (list []string, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		found, err := inside.RouteList(nil, family)
		if err != nil {
			return list, fmt.Errorf("list the routes: %w", err)
		}
		for _, route := range found {
			text := "default"
			if route.Dst != nil && !(route.Dst.IP.IsUnspecified() && isAll(route.Dst)) {
				text = route.Dst.String()
			}
			if route.Gw != nil {
				text += " via " + route.Gw.String()
			}
			if name := names[route.LinkIndex]; name != "" {
				text += " dev " + name
			}
			list = append(list, text)
		}
	}
	return list, nil
}

func isAll(network *net.IPNet) bool {
	ones, _ := network.Mask.Size()
	return ones == 0
}

// rulesTime is how long a list of rules may take: a node may have many.
const rulesTime = 5 * time.Second

// Rules are the rules of iptables, ip6tables and nftables in which an address or
// the id appears, each once. Programs that are not installed have none.
func Rules(ctx context.Context, id string, addresses []string) (rules []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, rulesTime)
	defer cancel()
	var errs []error
	for _, command := range [][]string{{"iptables-save"}, {"ip6tables-save"}, {"nft", "list", "ruleset"}} {
		program, err := exec.LookPath(command[0])
		if err != nil {
			continue
		}
		out, err := exec.CommandContext(ctx, program, command[1:]...).Output()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", strings.Join(command, " "), err))
			continue
		}
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSpace(line)
			if belongs(line, id, addresses) && !slices.Contains(rules, line) {
				rules = append(rules, line)
			}
		}
	}
	return rules, errors.Join(errs...)
}

// belongs reports whether a rule names the pod, or one of its addresses as a
// whole word: 10.0.0.1 is not in 10.0.0.12.
func belongs(rule, id string, addresses []string) bool {
	if id != "" && strings.Contains(rule, id) {
		return true
	}
	words := strings.FieldsFunc(rule, func(r rune) bool { return !strings.ContainsRune("0123456789abcdefABCDEF.:", r) })
	return slices.ContainsFunc(addresses, func(address string) bool {
		return slices.ContainsFunc(words, func(word string) bool {
			host, _, _ := strings.Cut(word, ":") // ADDRESS:PORT
			return word == address || host == address
		})
	})
}
