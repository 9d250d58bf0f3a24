package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/state"
)

// DefaultNetwork is the embedded network: a bridge with host-local addresses, masquerading and host ports. It
// is used while the configuration directory has no network.
type DefaultNetwork config.DefaultNetwork

// Survey is like the function Survey. The subnet need not be known yet.
func (d DefaultNetwork) Survey(binDirs []string) (*Configuration, []error) {
	known := new(programs)
	c, err := d.configuration(nil, false, d.choose(known, binDirs))
	if err != nil {
		return nil, []error{err}
	}
	return c, known.unfit(c, binDirs, true)
}

// choice is how the plugins of the embedded network are used: those of a directory before others, "" for none, with a
// version of the CNI SPEC that all of them support.
type choice struct{ directory, version string }

// embeddedPlugins are the programs that the embedded network needs.
var embeddedPlugins = []string{"bridge", "host-local", "portmap"}

// choose finds the directory that has the newest plugins: distributions install older ones into directories that are
// searched before minicri's own.
func (d DefaultNetwork) choose(known *programs, binDirs []string) choice {
	versions := []string{"1.1.0", "1.0.0", "0.4.0", "0.3.1"} // the last is the first with lists and chained plugins
	best, rank := choice{version: versions[0]}, len(versions)
	for _, directory := range append([]string{""}, binDirs...) {
		searched := binDirs
		if directory != "" {
			searched = append([]string{directory}, binDirs...)
		}
		for i := range rank {
			supports := func(plugin string) bool {
				path, err := invoke.FindInPath(plugin, searched)
				if err != nil {
					return false
				}
				found := known.look(path)
				return found.err == nil && (found.versions == nil || slices.Contains(found.versions, versions[i]))
			}
			if !slices.ContainsFunc(embeddedPlugins, func(plugin string) bool { return !supports(plugin) }) {
				best, rank = choice{directory, versions[i]}, i
				break
			}
		}
	}
	return best
}

// describePlugins writes the identity of the programs that choose looks at.
func (n *CNI) describePlugins(w io.Writer) {
	for _, directory := range n.options.BinDirs {
		for _, name := range embeddedPlugins {
			if info, err := os.Stat(filepath.Join(directory, name)); err == nil {
				fmt.Fprintln(w, directory, name, identity(info))
			}
		}
	}
}

// firstKey is the list's key of the directory whose plugins it uses before others. Plugins do not get it.
const firstKey = "minicri.plugins"

// searchedBy returns the directories in which the plugins of a configuration are searched.
func searchedBy(config []byte, binDirs []string) []string {
	var list struct {
		First string `json:"minicri.plugins"`
	}
	if !bytes.Contains(config, []byte(firstKey)) || json.Unmarshal(config, &list) != nil || list.First == "" {
		return binDirs
	}
	return append([]string{list.First}, binDirs...)
}

// configuration builds the list; masqueraded means that our nftables table masquerades.
func (d DefaultNetwork) configuration(subnets []netip.Prefix, masqueraded bool, chosen choice) (*Configuration, error) {
	network := map[string]any{
		"cniVersion": chosen.version,
		"name":       d.Name,
		"plugins": []map[string]any{
			{
				"type": "bridge", "bridge": d.Bridge, "isGateway": true, "ipMasq": d.Masquerade && !masqueraded,
				"hairpinMode": true, "ipam": d.ipam(subnets),
			},
			{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}, "snat": true},
		},
	}
	if masqueraded {
		network[masqueradeKey] = subnets
	}
	if len(subnets) > 0 {
		network[forwardKey] = subnets
	}
	if chosen.directory != "" {
		network[firstKey] = chosen.directory
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

// bridge is the network's, or one of an earlier configuration.
type bridge struct {
	netlink.Link
	ports bool // it has some
}

// ownBridges begin the names of bridges that may have been the network's. One of another name may be anybody's.
const ownBridges = "minicri"

func (d DefaultNetwork) bridges() (bridges []bridge, err error) {
	links, err := netlink.LinkList()
	for try := 0; try < 20 && errors.Is(err, netlink.ErrDumpInterrupted); try++ { // one came or went
		links, err = netlink.LinkList()
	}
	if err != nil {
		return nil, fmt.Errorf("look for the default network's bridge %s: %w", d.Bridge, err)
	}
	for _, link := range links {
		if name := link.Attrs().Name; link.Type() != "bridge" || name != d.Bridge && !strings.HasPrefix(name, ownBridges) {
			continue
		}
		bridges = append(bridges, bridge{link, slices.ContainsFunc(links, func(port netlink.Link) bool { return port.Attrs().MasterIndex == link.Attrs().Index })})
	}
	return bridges, nil
}

// freeBridge removes the bridge if it has an address of an earlier subnet, which the bridge plugin would refuse, and one
// of an earlier name that has an address of the subnets, to which the node would send what is for its pods. While pods
// are on it, it stays, no pod can be made, and the error names them.
func (n *CNI) freeBridge(d *DefaultNetwork, subnets []netip.Prefix) error {
	bridges, err := d.bridges()
	if err != nil {
		return err
	}
	for _, b := range bridges {
		name := b.Attrs().Name
		wrong, err := wrongAddress(b, subnets, name != d.Bridge)
		if err != nil {
			return err
		}
		if wrong == "" {
			continue
		}
		if pods := n.attachedTo(d.Name); len(pods) > 0 || b.ports {
			return fmt.Errorf("the default network's bridge %s has the address %s of an earlier subnet or name, and pods are on it: remove these, then it is made anew as %s for %v: %s", name, wrong, d.Bridge, subnets, strings.Join(pods, " "))
		}
		if err := netlink.LinkDel(b); err != nil {
			return fmt.Errorf("remove the default network's bridge %s, which has the address %s of an earlier subnet or name: %w", name, wrong, err)
		}
		n.options.Logger.Info("the default network has another subnet or bridge: it is made anew", "bridge", name, "had", wrong, "now", d.Bridge, "subnets", subnets)
	}
	return nil
}

// wrongAddress returns the gateway of another subnet among a bridge's addresses, of a bridge of another name that of one
// of the subnets; or "". The plugin gives a bridge the first address of each subnet. Others are an administrator's.
func wrongAddress(b bridge, subnets []netip.Prefix, renamed bool) (string, error) {
	addresses, err := netlink.AddrList(b, netlink.FAMILY_ALL)
	for try := 0; try < 20 && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
		addresses, err = netlink.AddrList(b, netlink.FAMILY_ALL)
	}
	if err != nil {
		return "", fmt.Errorf("list the addresses of %s: %w", b.Attrs().Name, err)
	}
	for _, address := range addresses {
		prefix, err := netip.ParsePrefix(address.IPNet.String())
		if err != nil || prefix.Addr().IsLinkLocalUnicast() || prefix.Addr() != prefix.Masked().Addr().Next() {
			continue
		}
		if slices.Contains(subnets, prefix.Masked()) == renamed {
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

// Leftovers finds the bridge, the table and the rules that an embedded network has left. It first looks at what exists
// and then for users in the lists of networks and attachments; unless it knows all, nothing is left.
func (d DefaultNetwork) Leftovers(mark string, lists func() (lists [][]byte, all bool)) (left []Leftover, err error) {
	bridges, err := d.bridges()
	if err != nil {
		return nil, err
	}
	table := mark + "masquerade"
	tables, _ := nft("", "list", "tables", "inet") // what cannot list any has made none
	inUse, all := lists()
	hasTable := all && slices.Contains(strings.Split(tables, "\n"), "table inet "+table)
	accepts := &forward{mark: mark + "forward"}
	hasRules := all && accepts.left()
	for _, list := range inUse {
		hasTable = hasTable && len(subnetsOf(list, masqueradeKey)) == 0
		hasRules = hasRules && len(subnetsOf(list, forwardKey)) == 0
	}
	if hasRules {
		left = append(left, Leftover{"nftables rules in chains of others", func() error { return accepts.put(nil) }})
	}
	for _, b := range bridges {
		name := b.Attrs().Name
		used := slices.ContainsFunc(inUse, func(list []byte) bool { return bytes.Contains(list, []byte(strconv.Quote(name))) })
		if all && !b.ports && !used && strings.HasPrefix(name, ownBridges) {
			left = append(left, Leftover{"bridge " + name, func() error { return netlink.LinkDel(b) }})
		}
	}
	if hasTable {
		left = append(left, Leftover{"nftables table inet " + table, func() error {
			_, err := nft("", "delete", "table", "inet", table)
			return err
		}})
	}
	return left, nil
}

// RouterLinks returns the links whose IPv6 default route comes from router advertisements and would be lost. The bridge
// plugin switches forwarding on for an IPv6 subnet, and the kernel then drops such routes and ignores advertisements,
// unless accept_ra is 2 (ip-sysctl.rst).
func RouterLinks(subnets []netip.Prefix) (links []string, err error) {
	if !slices.ContainsFunc(subnets, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		return nil, nil
	}
	filter := &netlink.Route{Protocol: unix.RTPROT_RA}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, filter, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return nil, fmt.Errorf("look for IPv6 default routes of router advertisements: %w", err)
	}
	for _, route := range routes {
		if route.Dst != nil && !route.Dst.IP.IsUnspecified() {
			continue
		}
		link, err := netlink.LinkByIndex(route.LinkIndex)
		if err != nil {
			continue // it was removed, and its route with it
		}
		name := link.Attrs().Name
		if value, err := os.ReadFile(acceptRA(name)); err == nil && strings.TrimSpace(string(value)) == "1" {
			links = append(links, name)
		}
	}
	return links, nil
}

func acceptRA(link string) string { return "/proc/sys/net/ipv6/conf/" + link + "/accept_ra" }

// keepRouterRoutes sets accept_ra to 2 for RouterLinks.
func keepRouterRoutes(logger *slog.Logger, subnets []netip.Prefix) error {
	links, err := RouterLinks(subnets)
	for _, name := range links {
		if err := os.WriteFile(acceptRA(name), []byte("2"), 0); err != nil {
			return fmt.Errorf("the node would lose its IPv6 default route of %s when the default network switches forwarding on: "+
				"set net.ipv6.conf.%[1]s.accept_ra=2: %w", name, err)
		}
		logger.Info("accept_ra is 2 now, so that the node keeps its IPv6 default route when it forwards", "link", name)
	}
	return err
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

func podCIDRFile(root string) string { return filepath.Join(root, "pod-cidr.json") }

// StoredPodCIDR returns the pod CIDR below a root directory, "" if none can be read.
func StoredPodCIDR(root string) (cidr string) {
	data, err := state.ReadFile(podCIDRFile(root))
	if err == nil {
		_ = json.Unmarshal(data, &cidr) // the daemon reports it
	}
	return cidr
}

// PodCIDR returns the pod CIDR that UpdateRuntimeConfig brought last, "" if none.
func (n *CNI) PodCIDR() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.podCIDR
}

// SetPodCIDR keeps the node's pod CIDR, over restarts too: the kubelet sends it only when it changes.
func (n *CNI) SetPodCIDR(cidr string) error {
	data, _ := json.Marshal(cidr) // never fails for a string
	if err := state.WriteFile(podCIDRFile(n.options.Root), data, true); err != nil {
		return fmt.Errorf("keep the pod CIDR: %w", err)
	}
	n.mu.Lock()
	n.podCIDR = cidr
	n.mu.Unlock()
	n.Reload()
	return nil
}

func (n *CNI) loadPodCIDR() error {
	data, err := state.ReadFile(podCIDRFile(n.options.Root))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &n.podCIDR); err != nil {
		n.options.Logger.Warn("the pod CIDR on disk cannot be read; the kubelet has to send it again", "file", podCIDRFile(n.options.Root), "err", err)
	}
	return nil
}
