package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
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
	h, err := n.hold(ctx, a)
	if err != nil {
		return nil, err
	}
	defer h.release()
	a.begun = true
	result, err := n.add(ctx, h, path)
	if err != nil {
		// What it answered may be no good.
		n.change(a, func(r *Attachment) { r.NeverAttached = !addSucceeded(*r) })
		return nil, err
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

// Drift is what CHECK found of an attachment that is not as ADD left it.
type Drift struct {
	ID      string    `json:"sandbox"`
	Network string    `json:"network"`
	Since   time.Time `json:"since"`
	Error   string    `json:"error"`
}

// checkPeriodically runs CHECK over all attachments once in a period, and when
// RequestCheck asks for it.
func (n *CNI) checkPeriodically() {
	for n.base.Err() == nil {
		n.awaitPeriod(n.checkNow, func(l Limits) time.Duration { return l.CheckPeriod })
		for _, id := range n.ids() {
			if n.base.Err() == nil {
				n.check(id)
			}
		}
	}
}

// RequestCheck has all attachments checked now, in the background.
func (n *CNI) RequestCheck() {
	select {
	case n.checkNow <- struct{}{}:
	default: // one is about to begin
	}
}

// check runs CHECK for one attachment and keeps what it found. A drift is shown
// and never acted upon: it is for people to decide what becomes of a pod.
func (n *CNI) check(id string) {
	a := n.find(id)
	if a == nil {
		return
	}
	h, err := n.hold(n.base, a)
	if err != nil {
		return
	}
	defer h.release()
	if a.removed || !a.attached || a.record.Releasing || a.released.Load() {
		return
	}
	err = n.call(context.Background(), h, a.record, "CHECK", n.limits.Load().Check, func(ctx context.Context, cni gocni.CNI) error {
		return cni.Check(ctx, id, n.NamespacePath(id), a.record.options()...)
	})
	if errors.Is(err, errEnding) || errors.Is(err, libcni.ErrorCheckNotSupp) {
		return // the last: a network before CNI 0.4.0 has no CHECK
	}
	logger := a.record.logger(n.options.Logger)
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case err == nil && a.drift != nil:
		a.drift = nil
		logger.Info("the attachment is as ADD left it again")
	case err != nil && a.drift == nil:
		a.drift = &Drift{ID: id, Network: a.record.Network, Since: time.Now(), Error: err.Error()}
		logger.Warn("the attachment is not as ADD left it", "err", err)
	}
}

// Drifted are the attachments that the last CHECK found changed, by id.
func (n *CNI) Drifted() []Drift {
	n.mu.Lock()
	defer n.mu.Unlock()
	drifted := []Drift{}
	for _, a := range n.attachments {
		if a.drift != nil {
			drifted = append(drifted, *a.drift)
		}
	}
	slices.SortFunc(drifted, func(a, b Drift) int { return strings.Compare(a.ID, b.ID) })
	return drifted
}
