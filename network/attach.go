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

// The values of capabilities are go-cni's.
type (
	PortMapping = gocni.PortMapping
	BandWidth   = gocni.BandWidth
	DNS         = gocni.DNS
)

// ErrNoAddress means that ADD succeeded and gave eth0 no address.
var ErrNoAddress = errors.New("the CNI result has no address for eth0")

// eth0 is the interface that has the pod's addresses.
const eth0 = "eth0"

// Result is what ADD gave a pod.
type Result struct {
	// Addresses are those of eth0, the primary one first. Raw has the networks' results as plugins gave them.
	Addresses []netip.Addr
	Raw       []*types100.Result
}

// Journal writes the attachment to the journal. SyncJournal makes it durable, beside other steps, before Attach.
func (n *CNI) Journal(a Attachment) error {
	n.supersede(a)
	a.Node, a.Boot = n.options.Mark, n.bootID
	if err := n.journal.Put(a.ID, a); err != nil {
		return fmt.Errorf("journal the attachment: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.attachments[a.ID] = newAttachment(a)
	return nil
}

// supersede removes the namespaces of the pod's earlier tries whose ADD failed: a pod has one namespace.
func (n *CNI) supersede(a Attachment) {
	pod := func(of Attachment) string {
		return of.Args["K8S_POD_UID"] + " " + of.Args["K8S_POD_NAMESPACE"] + "/" + of.Args["K8S_POD_NAME"]
	}
	for _, other := range n.Pending() {
		if !other.Releasing || !other.NeverAttached || a.Args["K8S_POD_NAME"] == "" || pod(a) != pod(other) {
			continue
		}
		if err := n.options.Namespaces.Remove(other.ID); err != nil {
			other.logger(n.options.Logger).Error("the network namespace of an earlier try of a pod stays", "err", err)
		}
	}
}

// SyncJournal makes the attachment of id durable, if there is one.
func (n *CNI) SyncJournal(id string) error {
	if n.find(id) == nil {
		return nil
	}
	return n.journal.Sync(id)
}

// Attach runs ADD for the journalled attachment of id in the namespace at path. If it fails, or the context
// ends first, the attachment stays in the journal and the caller has to call Detach.
func (n *CNI) Attach(ctx context.Context, id, path string) (*Result, error) {
	a := n.find(id)
	if a == nil {
		return nil, fmt.Errorf("attach %s: it is not in the journal", id)
	}
	h, err := n.lock(ctx, a)
	if err != nil {
		return nil, err
	}
	defer h.release()
	a.begun = true
	record := a.record
	var result *gocni.Result
	err = n.call(ctx, h, record, "ADD", n.limits.Load().Add, func(ctx context.Context, cni gocni.CNI) (err error) {
		// Setup would read answers in goroutines of its own, where we could not recover from a panic.
		result, err = cni.SetupSerially(ctx, record.ID, path, record.options()...)
		return err
	})
	if err != nil {
		// libcni may have cached even an answer that we cannot use.
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

// SetCapability stores the value of a capability as JSON.
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

// addresses returns those of eth0: the first IPv4 address, which containerd takes for the primary one by
// default, then the others in the plugins' order.
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

// Drift is what CHECK found changed of an attachment since ADD.
type Drift struct {
	ID      string    `json:"sandbox"`
	Network string    `json:"network"`
	Since   time.Time `json:"since"`
	Error   string    `json:"error"`
}

// checkPeriodically checks all attachments once in a period and when RequestCheck asks for it.
func (n *CNI) checkPeriodically() {
	for n.base.Err() == nil {
		n.awaitPeriod(n.checkNow, func(l Limits) time.Duration { return l.CheckPeriod })
		for _, id := range n.ids() {
			n.check(id)
		}
	}
}

// RequestCheck has all attachments checked in the background now.
func (n *CNI) RequestCheck() { notify(n.checkNow) }

// notify sends to a channel of capacity 1, unless a value already waits there.
func notify(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// check runs CHECK and keeps the result. A drift is only reported: people decide what becomes of the pod.
func (n *CNI) check(id string) {
	a := n.find(id)
	if a == nil {
		return
	}
	h, err := n.lock(n.base, a)
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
	n.mu.Lock()
	last := a.drift
	switch {
	case err == nil:
		a.drift = nil
	case last == nil:
		a.drift = &Drift{ID: id, Network: a.record.Network, Since: time.Now(), Error: err.Error()}
	}
	n.mu.Unlock()
	switch logger := a.record.logger(n.options.Logger); {
	case err == nil && last != nil:
		logger.Info("the attachment is as ADD left it again")
	case err != nil && last == nil:
		logger.Warn("the attachment is not as ADD left it", "err", err)
	}
}

// Drifted returns the attachments that the last CHECK found changed, sorted by id.
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
