package network

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/containernetworking/cni/libcni"

	"github.com/minicri/minicri/state"
)

// DefaultNetwork is the embedded network for a machine that has none: a bridge
// with host-local addresses, masquerade and host ports. It is used while the
// configuration directory has no network; a file there takes its place.
type DefaultNetwork struct {
	Enabled bool
	// Name is the network's, Bridge the bridge's interface name.
	Name, Bridge string
	// Subnet is one subnet or two (IPv4 and IPv6) with a comma between them;
	// "" waits for the pod CIDR that UpdateRuntimeConfig brings.
	Subnet string
	// DataDir is where host-local keeps addresses; "" is its own default.
	DataDir string
}

//go:embed default.conflist.tmpl
var defaultTemplate string

func (d DefaultNetwork) configuration(podCIDR string) (*Configuration, error) {
	subnets := d.Subnet
	if subnets == "" {
		subnets = podCIDR
	}
	if subnets == "" {
		return nil, errors.New("the default network has no subnet: set default_network.subnet, or let the kubelet send the pod CIDR")
	}
	prefixes, err := ParseSubnets(subnets)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	parsed, err := template.New("default").Parse(defaultTemplate)
	if err != nil {
		return nil, err
	}
	if err := parsed.Execute(&b, map[string]any{"Network": d, "Subnets": prefixes}); err != nil {
		return nil, err
	}
	list, err := libcni.NetworkConfFromBytes(b.Bytes())
	if err != nil {
		return nil, fmt.Errorf("the default network: %w", err)
	}
	return newConfiguration(list, "")
}

// ParseSubnets reads one subnet or several with commas between them.
func ParseSubnets(subnets string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	for _, subnet := range strings.Split(subnets, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(subnet))
		if err != nil {
			return nil, fmt.Errorf("subnet %q: %w", subnet, err)
		}
		prefixes = append(prefixes, prefix.Masked())
	}
	return prefixes, nil
}

func (n *Networks) podCIDRFile() string { return filepath.Join(n.options.Root, "pod-cidr.json") }

// PodCIDR is the pod CIDR that UpdateRuntimeConfig brought last, "" if none.
func (n *Networks) PodCIDR() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.podCIDR
}

// SetPodCIDR keeps the node's pod CIDR, over restarts too: the kubelet sends
// it only when it changes. The default network follows it.
func (n *Networks) SetPodCIDR(cidr string) error {
	data, err := json.Marshal(cidr)
	if err != nil {
		return err
	}
	if err := state.WriteFile(n.podCIDRFile(), data, true); err != nil {
		return fmt.Errorf("keep the pod CIDR: %w", err)
	}
	n.mu.Lock()
	n.podCIDR = cidr
	n.mu.Unlock()
	n.Reload()
	return nil
}

func (n *Networks) loadPodCIDR() error {
	data, err := os.ReadFile(n.podCIDRFile())
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
