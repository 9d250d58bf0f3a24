package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	gocni "github.com/containerd/go-cni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// The values of the capabilities, as go-cni has them.
type (
	PortMapping = gocni.PortMapping
	BandWidth   = gocni.BandWidth
	DNS         = gocni.DNS
)

// ErrNoAddress says that ADD succeeded and gave eth0 no address.
var ErrNoAddress = errors.New("the CNI result has no address for eth0")

// eth0 is the interface whose addresses are the pod's.
const eth0 = "eth0"

// Result is what ADD gave to a pod.
type Result struct {
	// Addresses of eth0, the primary one first.
	Addresses []netip.Addr
	// Raw are the results of the networks as the plugins gave them.
	Raw []*types100.Result
}

// Attach runs ADD for the attachment that was journalled for id, in the
// namespace at path. When ADD fails, or the context ends first, the attachment stays in the
// journal, and Detach has to be called.
func (n *CNI) Attach(ctx context.Context, id, path string) (*Result, error) {
	a := n.find(id)
	if a == nil {
		return nil, fmt.Errorf("attach %s: it is not in the journal", id)
	}
	held, err := n.lock(ctx, a)
	if err != nil {
		return nil, err
	}
	a.begun = true
	result, o := n.plugins.add(ctx, a.record, path)
	defer held.release(o)
	if o.err != nil {
		a.record.NeverAttached = !addSucceeded(a.record) // what it answered may be no good
		return nil, o.err
	}
	a.attached = true
	return &Result{Addresses: addresses(result), Raw: result.Raw()}, nil
}

func (a *Attachment) options() []gocni.NamespaceOpts {
	options := []gocni.NamespaceOpts{gocni.WithLabels(a.Args)}
	for name, value := range a.Capabilities {
		options = append(options, gocni.WithCapability(name, value))
	}
	return options
}

// SetCapability stores the value of a capability.
func (a *Attachment) SetCapability(name string, value any) error {
	encoded, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode the CNI capability %s: %w", name, err)
	}
	if a.Capabilities == nil {
		a.Capabilities = make(map[string]json.RawMessage)
	}
	a.Capabilities[name] = encoded
	return nil
}

// addresses of eth0: the first IPv4 address is the primary one, as containerd
// has it by default; the others follow in the plugins' order.
func addresses(result *gocni.Result) []netip.Addr {
	config := result.Interfaces[eth0]
	if config == nil {
		return nil
	}
	var all []netip.Addr
	for _, ip := range config.IPConfigs {
		if address, ok := netip.AddrFromSlice(ip.IP); ok {
			all = append(all, address.Unmap())
		}
	}
	if first := slices.IndexFunc(all, netip.Addr.Is4); first > 0 {
		primary := all[first]
		all = slices.Insert(slices.Delete(all, first, first+1), 0, primary)
	}
	return all
}
