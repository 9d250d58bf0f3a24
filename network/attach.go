package network

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step/failpoint"
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
	Config    []byte             // of the network
	Addresses []netip.Addr       // of eth0, the primary one first
	Raw       []*types100.Result // as plugins gave them
}

// Attach runs ADD with the directory's network in the namespace at path, with the id, arguments and capabilities of the
// attachment, which is in the journal, and on the disk, before ADD begins. If Attach fails, or the context ends first,
// it can be there still: the caller has to call Detach. The result has the network's configuration also then.
func (d *Directory) Attach(ctx context.Context, record Attachment, path string) (Result, error) {
	configuration, err := d.latest(ctx)
	if err == nil {
		err = d.remarked(d.owner.programs.unsupported(configuration, d.owner.options.BinDirs))
	}
	if err != nil {
		return Result{}, fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	record.Network, record.Config = configuration.Name, configuration.Bytes
	result := Result{Config: record.Config}
	a, err := d.owner.enroll(record)
	if err != nil {
		return result, err
	}
	said, err := d.owner.add(ctx, a, path)
	if err == nil {
		result.Addresses, result.Raw = addresses(said), said.Raw()
	}
	return result, d.remarked(err)
}

// AttachIn is Attach of the directory at a path, "" for the node's.
func (n *CNI) AttachIn(ctx context.Context, confDir string, record Attachment, path string) (Result, error) {
	return n.In(confDir).Attach(ctx, record, path)
}

// enroll writes an attachment to the journal.
func (n *CNI) enroll(record Attachment) (*attachment, error) {
	n.supersede(record)
	record.Node, record.Boot = n.options.Mark, n.bootID
	if err := n.journal.Put(record.ID, record); err != nil {
		return nil, fmt.Errorf("journal the attachment: %w", err)
	}
	a := newAttachment(record)
	n.mu.Lock()
	n.attachments[record.ID] = a
	n.mu.Unlock()
	return a, n.journal.Sync(record.ID)
}

// supersede removes the namespaces of the pod's earlier tries whose ADD failed: a pod keeps one namespace.
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

// add runs ADD for an attachment.
func (n *CNI) add(ctx context.Context, a *attachment, path string) (result *gocni.Result, err error) {
	h, err := n.lock(ctx, a)
	if err != nil {
		return nil, err
	}
	defer h.release()
	a.begun = true
	record := a.record
	err = n.call(ctx, h, record, "ADD", n.limits.Load().Add, func(ctx context.Context, cni gocni.CNI) (err error) {
		// Setup would read answers in goroutines of its own, where we could not recover from a panic.
		result, err = cni.SetupSerially(ctx, record.ID, path, record.options()...)
		return err
	})
	if err != nil {
		// libcni may have cached even an answer that we cannot use.
		n.change(a, func(r *Attachment) { r.NeverAttached = !n.addSucceeded(*r) })
		return nil, err
	}
	a.attached = true
	return result, nil
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
		n.awaitPeriod(n.base, n.checkNow, func(l Limits) time.Duration { return l.CheckPeriod })
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
		return cni.Check(ctx, id, n.pathAsAdded(a.record, n.NamespacePath(id)), a.record.options()...)
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

// Attachment is an entry of the journal: the arguments of ADD, and how far DEL has come. It has all that DEL
// and CHECK need, because the configuration may have changed (CNI SPEC: DEL takes the configuration of ADD).
type Attachment struct {
	ID      string          `json:"id"`
	Network string          `json:"network"`
	Config  json.RawMessage `json:"config"`
	// Args are CNI_ARGS. Capabilities go to plugins that declare them (CNI CONVENTIONS).
	Args         map[string]string          `json:"args,omitempty"`
	Capabilities map[string]json.RawMessage `json:"capabilities,omitempty"`
	// Source says where this was found if not in the journal. Node is the mark of the node that wrote it.
	Source string `json:"source,omitempty"`
	Node   string `json:"node,omitempty"`
	// NeverAttached is set once ADD is known to have failed: see giveUp. Releasing means that it has to go.
	Boot          string `json:"boot,omitempty"`
	NeverAttached bool   `json:"never_attached,omitempty"`
	Releasing     bool   `json:"releasing,omitempty"`
	// Tries counts failed DELs, Stops those of Detach. FirstFailure and LastError are the first and the last.
	Tries        int       `json:"tries,omitempty"`
	Stops        int       `json:"stops,omitempty"`
	FirstFailure time.Time `json:"first_failure,omitzero"`
	LastError    string    `json:"last_error,omitempty"`
}

// logger adds the attachment and its pod to each line. These fields never change, so it needs no lock.
func (a *Attachment) logger(to *slog.Logger) *slog.Logger {
	for _, name := range [][2]string{
		{"namespace", a.Args["K8S_POD_NAMESPACE"]}, {"pod", a.Args["K8S_POD_NAME"]}, {"sandbox", a.ID}, {"network", a.Network},
	} {
		if name[1] != "" {
			to = to.With(name[0], name[1])
		}
	}
	return to
}

// attachment is an Attachment in memory. The holder of its lock may run plugins for it and, under CNI.mu,
// change the record: either lock is enough to read.
type attachment struct {
	lock   lock
	record Attachment
	// begun is set before ADD: until then there is nothing to undo. attached is set when ADD has succeeded,
	// removed when the record has left the journal, unwritten for good if its entry could not be written.
	begun, attached, removed, unwritten bool
	// repeated is set while the background repeats DEL, which hurried wakes up, and released by Release.
	repeated, released atomic.Bool
	// early is set while a DEL is brought forward.
	early   atomic.Bool
	hurried chan struct{}
	// drift is what the last CHECK found, nil if nothing; CNI.mu guards it.
	drift *Drift
}

func newAttachment(record Attachment) *attachment {
	// The journal indents the configuration that it stores.
	var config bytes.Buffer
	if json.Compact(&config, record.Config) == nil {
		record.Config = config.Bytes()
	}
	a := &attachment{lock: lock{taken: make(chan struct{}, 1)}, record: record, hurried: make(chan struct{}, 1)}
	a.lock.unstick()
	return a
}

// lock serializes the runs of an attachment. A run whose processes do not end can hold it: nobody waits for that.
type lock struct {
	taken chan struct{}                 // has a value while somebody holds the lock
	stuck atomic.Pointer[chan struct{}] // closed while the holder is stuck
}

func (l *lock) unstick() { l.stuck.Store(new(make(chan struct{}))) }

func (l *lock) stick() { close(*l.stuck.Load()) }

func (l *lock) isStuck() bool {
	select {
	case <-*l.stuck.Load():
		return true
	default:
		return false
	}
}

func (l *lock) tryAcquire() bool {
	select {
	case l.taken <- struct{}{}:
		return true
	default:
		return false
	}
}

// acquire returns errStuck at once if the holder is stuck.
func (l *lock) acquire(ctx context.Context) error {
	if l.tryAcquire() {
		return nil
	}
	select {
	case l.taken <- struct{}{}:
		return nil
	case <-*l.stuck.Load():
		return fmt.Errorf("%w: 'crictl info' lists them as stuckPlugins; free them of what holds them, "+
			"such as a frozen cgroup or a dead disk", errStuck)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (l *lock) release() { <-l.taken }

// locked is an attachment whose lock is taken; GC of its network waits until leave.
type locked struct {
	*attachment
	leave func()
	// keep is called by release instead of unlocking: a run that is stuck, or left to the next daemon, keeps the lock.
	keep func()
}

// lock takes the attachment's lock. It returns errStuck at once if a run holds it whose processes do not end.
func (n *CNI) lock(ctx context.Context, a *attachment) (*locked, error) {
	if err := a.lock.acquire(ctx); err != nil {
		return nil, fmt.Errorf("wait for another plugin run of sandbox %s: %w", a.record.ID, err)
	}
	return n.enter(ctx, a)
}

// enter waits for GC of the network to end, and ends one that takes long; the caller has the attachment's lock.
func (n *CNI) enter(ctx context.Context, a *attachment) (*locked, error) {
	gate := n.gate(a.record.Network)
	defer time.AfterFunc(gcWait, func() {
		if end := gate.end.Load(); end != nil {
			(*end)()
		}
	}).Stop()
	if err := gate.Acquire(ctx, 1); err != nil {
		a.lock.release()
		return nil, fmt.Errorf("wait for CNI GC to end: %w", context.Cause(ctx))
	}
	return &locked{attachment: a, leave: sync.OnceFunc(func() { gate.leave(1) })}, nil
}

func (h *locked) release() {
	h.leave()
	if h.keep != nil {
		h.keep()
	} else {
		h.lock.release()
	}
}

func (n *CNI) change(a *attachment, do func(*Attachment)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	do(&a.record)
}

func (n *CNI) openJournal() error {
	journal, err := state.Open[Attachment](n.journalDir(), 1, true) // the version of its schema
	if err != nil {
		return err
	}
	journal.WrittenBy(n.options.Version)
	journal.Hit(failpoint.From(n.base))
	records, bad, err := journal.Load()
	if err != nil {
		return err
	}
	n.journal = journal
	for id, record := range records {
		// The DEL of what is not this node's would free what a running pod uses.
		if record.Node != "" && record.Node != n.options.Mark {
			b := journal.Quarantine(id, fmt.Errorf("it is an entry of another node, %s, and this one is %s", record.Node, n.options.Mark))
			n.options.Logger.Error("attachment quarantined: nothing of it is touched", "file", b.Path, "err", b.Reason)
			continue
		}
		if record.ID != id { // perhaps in the place of a pod's own
			bad = append(bad, journal.Quarantine(id, fmt.Errorf("it is a copy of the entry of sandbox %q", record.ID)))
			continue
		}
		succeeded := n.addSucceeded(record)
		// A failed DEL has noted what was known then. After a reboot a missing cache shows nothing: it may be lost.
		record.NeverAttached = record.NeverAttached || !succeeded && !record.Releasing && record.Boot == n.bootID
		a := newAttachment(record)
		a.begun, a.attached = true, succeeded && !record.Releasing
		n.attachments[id] = a
		if record.Releasing {
			n.repeat(a, true)
		}
	}
	for _, b := range bad {
		n.openUnreadable(b)
	}
	return nil
}

// Quarantined returns the files of attachments that cannot be decoded.
func (n *CNI) Quarantined() []string { return n.journal.Quarantined() }

// addSucceeded reports whether ADD did: libcni caches its answer once all plugins have succeeded, until DEL.
func (n *CNI) addSucceeded(a Attachment) bool {
	_, err := os.Lstat(n.cachePath(a))
	return !errors.Is(err, fs.ErrNotExist)
}

func (n *CNI) cachePath(a Attachment) string { return CachePath(n.options.CacheDir, a.Network, a.ID) }

// CachePath is where libcni keeps the answer to ADD; Options.CacheDir explains dir.
func CachePath(dir, network, id string) string {
	return filepath.Join(cmp.Or(dir, libcni.CacheDir), "results", network+"-"+id+"-"+eth0)
}

// KnowAttached says that the ADD of id succeeded. A lost entry is made anew from libcni's cache, which DEL removes.
// Where that is lost, too, GC at least spares what the pod has.
func (n *CNI) KnowAttached(id string) {
	if a := n.find(id); a != nil {
		n.change(a, func(r *Attachment) { r.NeverAttached = false })
	} else if _, err := n.cachedAttachment(id); err == nil {
		n.openUnreadable(state.Bad{ID: id, Path: n.journal.Path(id), Reason: fs.ErrNotExist})
	} else {
		n.unread = append(n.unread, id)
	}
}

func (n *CNI) remove(a *attachment) error {
	if err := n.journal.Remove(a.record.ID); err != nil {
		return fmt.Errorf("remove the attachment from the journal: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	a.removed = true
	notify(a.hurried)
	delete(n.attachments, a.record.ID)
	return nil
}

func (n *CNI) find(id string) *attachment {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.attachments[id]
}

// Pending returns the attachments whose DEL is repeated, sorted by id. Their pods may be long gone.
func (n *CNI) Pending() []Attachment {
	var pending []Attachment
	n.mu.Lock()
	for _, a := range n.attachments {
		if a.record.Releasing || a.released.Load() {
			pending = append(pending, a.record)
		}
	}
	n.mu.Unlock()
	slices.SortFunc(pending, func(a, b Attachment) int { return strings.Compare(a.ID, b.ID) })
	return pending
}

// openUnreadable opens an attachment without a readable entry, for its pod may run: DEL gets what libcni has
// cached of ADD. If there is nothing, ADD has not succeeded, and the entry stays for a person.
func (n *CNI) openUnreadable(bad state.Bad) {
	logger := n.options.Logger.With("sandbox", bad.ID, "file", bad.Path)
	logger.Error("the entry of an attachment cannot be used", "err", bad.Reason)
	record, err := n.cachedAttachment(bad.ID)
	if err != nil {
		n.unread = append(n.unread, bad.ID)
		logger.Error("CNI DEL cannot be run: no configuration of an ADD for this id is known; its addresses, if it has any, have to be freed by hand", "err", err)
		return
	}
	logger = record.logger(n.options.Logger).With("file", bad.Path)
	logger.Warn("CNI DEL will run with the configuration that can still be found", "source", record.Source)
	a := newAttachment(record)
	a.begun, a.attached = true, true
	n.mu.Lock()
	defer n.mu.Unlock()
	n.attachments[bad.ID] = a
	if _, err := os.Lstat(n.journal.Path(bad.ID)); err == nil {
		return // it is where it was, and may be readable the next time
	}
	if err := n.journal.Write(bad.ID, record); err != nil {
		a.unwritten = true
		logger.Error("the attachment is not in the journal on disk", "err", err)
	}
}

func (n *CNI) cachedAttachment(id string) (Attachment, error) {
	cached, err := libcni.NewCNIConfigWithCacheDir(nil, n.options.CacheDir, nil).GetCachedAttachments(id)
	for _, c := range cached {
		if c.IfName != eth0 {
			continue
		}
		a := Attachment{ID: id, Network: c.Network, Config: c.Config, Args: make(map[string]string), Source: "libcni's cache"}
		for _, arg := range c.CniArgs {
			a.Args[arg[0]] = arg[1]
		}
		for name, value := range c.CapabilityArgs {
			if err := a.SetCapability(name, value); err != nil {
				return a, err
			}
		}
		return a, nil
	}
	return Attachment{}, cmp.Or(err, fs.ErrNotExist)
}
