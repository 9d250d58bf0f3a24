package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/state"
)

// DefaultNetwork is the embedded network: a bridge with host-local addresses, masquerading and host ports. It
// is used while the configuration directory has no network.
type DefaultNetwork config.DefaultNetwork

// Survey is like the function Survey. The subnet need not be known yet.
func (d DefaultNetwork) Survey(binDirs []string) (*Configuration, []error) {
	c, err := d.configuration(nil, false)
	if err != nil {
		return nil, []error{err}
	}
	return c, missing(c, binDirs, true)
}

// configuration builds the list; masqueraded means that our nftables table masquerades.
func (d DefaultNetwork) configuration(subnets []netip.Prefix, masqueraded bool) (*Configuration, error) {
	network := map[string]any{
		"cniVersion": "1.1.0",
		"name":       d.Name,
		"plugins": []map[string]any{
			{"type": "bridge", "bridge": d.Bridge, "isGateway": true, "ipMasq": d.Masquerade && !masqueraded, "hairpinMode": true, "ipam": d.ipam(subnets)},
			{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}, "snat": true},
		},
	}
	if masqueraded {
		network[masqueradeKey] = subnets
	}
	encoded, _ := json.Marshal(network) // never fails for texts, truths and prefixes
	list, err := libcni.NetworkConfFromBytes(encoded)
	if err != nil {
		return nil, fmt.Errorf("encode the default network: %w", err)
	}
	return newConfiguration(list, "")
}

// ipam gives each pod an address of every subnet and a default route for each.
func (d DefaultNetwork) ipam(subnets []netip.Prefix) map[string]any {
	ranges := [][]map[string]string{}
	routes := []map[string]string{}
	for _, subnet := range subnets {
		everything := "::/0"
		if subnet.Addr().Is4() {
			everything = "0.0.0.0/0"
		}
		ranges = append(ranges, []map[string]string{{"subnet": subnet.String()}})
		routes = append(routes, map[string]string{"dst": everything})
	}
	ipam := map[string]any{"type": "host-local", "ranges": ranges, "routes": routes}
	if d.DataDir != "" {
		ipam["dataDir"] = d.DataDir
	}
	return ipam
}

// bridge returns the bridge, nil if there is none or another link has its name, and whether it has ports.
func (d DefaultNetwork) bridge() (bridge netlink.Link, ports bool, err error) {
	bridge, err = netlink.LinkByName(d.Bridge)
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none || err == nil && bridge.Type() != "bridge" {
		return nil, false, nil
	}
	var links []netlink.Link
	if err == nil {
		links, err = netlink.LinkList()
	}
	if err != nil {
		return nil, false, fmt.Errorf("look at the default network's bridge %s: %w", d.Bridge, err)
	}
	ports = slices.ContainsFunc(links, func(link netlink.Link) bool { return link.Attrs().MasterIndex == bridge.Attrs().Index })
	return bridge, ports, nil
}

// freeBridge removes the bridge if it has an address of an earlier subnet, which the bridge plugin would
// refuse. While pods are on it, it stays, no pod can be made, and the error names them.
func (n *CNI) freeBridge(d *DefaultNetwork, subnets []netip.Prefix) error {
	bridge, ports, err := d.bridge()
	if bridge == nil || err != nil {
		return err
	}
	earlier, err := earlierAddress(bridge, subnets)
	if earlier == "" || err != nil {
		return err
	}
	if pods := n.attachedTo(d.Name); len(pods) > 0 || ports {
		return fmt.Errorf("the default network's bridge %s has the address %s of an earlier subnet, and pods are on it: remove these, then it is made anew for %v: %s", d.Bridge, earlier, subnets, strings.Join(pods, " "))
	}
	if err := netlink.LinkDel(bridge); err != nil {
		return fmt.Errorf("remove the default network's bridge %s, which has the address %s of an earlier subnet: %w", d.Bridge, earlier, err)
	}
	n.options.Logger.Info("the default network has another subnet: its bridge is made anew", "bridge", d.Bridge, "had", earlier, "subnets", subnets)
	return nil
}

// earlierAddress returns the gateway of an earlier subnet among the bridge's addresses, or "": the plugin gives
// a bridge the first address of each subnet. Others are an administrator's.
func earlierAddress(bridge netlink.Link, subnets []netip.Prefix) (string, error) {
	addresses, err := netlink.AddrList(bridge, netlink.FAMILY_ALL)
	if err != nil {
		return "", fmt.Errorf("list the addresses of %s: %w", bridge.Attrs().Name, err)
	}
	for _, address := range addresses {
		prefix, err := netip.ParsePrefix(address.IPNet.String())
		if err != nil || prefix.Addr().IsLinkLocalUnicast() || prefix.Addr() != prefix.Masked().Addr().Next() {
			continue
		}
		if !slices.Contains(subnets, prefix.Masked()) {
			return prefix.String(), nil
		}
	}
	return "", nil
}

// Leftover is a part of the embedded network that exists although the network is not in use.
type Leftover struct {
	What   string
	Remove func() error
}

// Leftovers finds the bridge and the table that an embedded network has left. It first looks at what exists
// and then for users in the lists of networks and attachments; unless it knows all, nothing is left.
func (d DefaultNetwork) Leftovers(mark string, lists func() (lists [][]byte, all bool)) (left []Leftover, err error) {
	bridge, ports, err := d.bridge()
	if err != nil {
		return nil, err
	}
	table := mark + "masquerade"
	tables, _ := nft("", "list", "tables", "inet") // what cannot list any has made none
	inUse, all := lists()
	hasTable := all && slices.Contains(strings.Split(tables, "\n"), "table inet "+table)
	// A bridge that an operator has named may be anybody's.
	hasBridge := all && bridge != nil && !ports && strings.HasPrefix(d.Bridge, "minicri")
	for _, list := range inUse {
		hasBridge = hasBridge && !bytes.Contains(list, []byte(strconv.Quote(d.Bridge)))
		hasTable = hasTable && len(masqueradedBy(list)) == 0
	}
	if hasBridge {
		left = append(left, Leftover{"bridge " + d.Bridge, func() error { return netlink.LinkDel(bridge) }})
	}
	if hasTable {
		left = append(left, Leftover{"nftables table inet " + table, func() error {
			_, err := nft("", "delete", "table", "inet", table)
			return err
		}})
	}
	return left, nil
}

// attachedTo returns the sandboxes that have, or may have, an attachment to a network.
func (n *CNI) attachedTo(network string) (ids []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, a := range n.attachments {
		if a.record.Network == network {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (n *CNI) podCIDRFile() string { return filepath.Join(n.options.Root, "pod-cidr.json") }

// PodCIDR returns the pod CIDR that UpdateRuntimeConfig brought last, "" if none.
func (n *CNI) PodCIDR() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.podCIDR
}

// SetPodCIDR keeps the node's pod CIDR, over restarts too: the kubelet sends it only when it changes.
func (n *CNI) SetPodCIDR(cidr string) error {
	data, _ := json.Marshal(cidr) // never fails for a string
	if err := state.WriteFile(n.podCIDRFile(), data, true); err != nil {
		return fmt.Errorf("keep the pod CIDR: %w", err)
	}
	n.mu.Lock()
	n.podCIDR = cidr
	n.mu.Unlock()
	n.Reload()
	return nil
}

func (n *CNI) loadPodCIDR() error {
	data, err := state.ReadFile(n.podCIDRFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &n.podCIDR); err != nil {
		n.options.Logger.Warn("the pod CIDR on disk cannot be read; the kubelet has to send it again", "file", n.podCIDRFile(), "err", err)
	}
	return nil
}
