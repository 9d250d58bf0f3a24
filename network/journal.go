package network

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sync/semaphore"

	"github.com/minicri/minicri/internal/state"
)

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
	lock   *semaphore.Weighted
	record Attachment
	// begun is set before ADD: until then there is nothing to undo. attached is set when ADD has succeeded,
	// removed when the record has left the journal, unwritten for good if its entry could not be written.
	begun, attached, removed, unwritten bool
	// stuck is set while a run whose processes do not end holds the lock, repeated while the background
	// repeats DEL, which hurried wakes up, and released by Release.
	stuck, repeated, released atomic.Bool
	hurried                   chan struct{}
	// drift is what the last CHECK found, nil if nothing; CNI.mu guards it.
	drift *Drift
}

func newAttachment(record Attachment) *attachment {
	return &attachment{lock: semaphore.NewWeighted(1), record: record, hurried: make(chan struct{}, 1)}
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
		succeeded := addSucceeded(record)
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
func addSucceeded(a Attachment) bool {
	_, err := os.Lstat(CachePath(a.Network, a.ID))
	return !errors.Is(err, fs.ErrNotExist)
}

// CachePath is where libcni keeps the answer to ADD.
func CachePath(network, id string) string {
	return filepath.Join(libcni.CacheDir, "results", network+"-"+id+"-"+eth0)
}

// KnowAttached says that the ADD of id succeeded. A lost entry is made anew from libcni's cache, which DEL removes.
// Where that is lost, too, GC at least spares what the pod has.
func (n *CNI) KnowAttached(id string) {
	if a := n.find(id); a != nil {
		n.change(a, func(r *Attachment) { r.NeverAttached = false })
	} else if _, err := cachedAttachment(id); err == nil {
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
	record, err := cachedAttachment(bad.ID)
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

func cachedAttachment(id string) (Attachment, error) {
	cached, err := libcni.NewCNIConfig(nil, nil).GetCachedAttachments(id)
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
