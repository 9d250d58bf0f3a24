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

// journalVersion is the schema of the journal's files.
const journalVersion = 1

// Attachment is one line of the journal: what ADD was, or will be, called
// with, and how its undoing stands. Everything that DEL and CHECK need is in
// it, because the configuration directory may say something else by then
// (CNI SPEC: DEL takes the configuration of ADD).
type Attachment struct {
	ID      string `json:"id"`
	Network string `json:"network"`
	// Config is the configuration list, as one document.
	Config json.RawMessage `json:"config"`
	// Args are CNI_ARGS, Capabilities the values for plugins that declare the
	// capability of that name (CNI CONVENTIONS).
	Args         map[string]string          `json:"args,omitempty"`
	Capabilities map[string]json.RawMessage `json:"capabilities,omitempty"`

	// Source says where this was read when the entry of the journal could not
	// be; "" for the journal.
	Source string `json:"source,omitempty"`

	// Node is the mark of the node that wrote it.
	Node string `json:"node,omitempty"`
	// Boot is the boot in which it was journalled. NeverAttached is set once it is known
	// that its ADD did not succeed: its undoing has an end then, see giveUp.
	Boot          string `json:"boot,omitempty"`
	NeverAttached bool   `json:"never_attached,omitempty"`

	// Releasing is set once the attachment has to go.
	Releasing bool `json:"releasing,omitempty"`
	// Tries counts the DELs that failed, FirstFailure and LastError describe
	// the first and the last of them. Stops counts those of them that a caller
	// of Detach waited for.
	Tries        int       `json:"tries,omitempty"`
	Stops        int       `json:"stops,omitempty"`
	FirstFailure time.Time `json:"first_failure,omitzero"`
	LastError    string    `json:"last_error,omitempty"`
}

// logger names the attachment and its pod in each line. It reads what never changes, so
// that it needs no lock.
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

// attachment is an Attachment in memory. Who holds its lock may run plugins for it, and
// changes the record, under CNI.mu: it is read under either.
type attachment struct {
	lock *semaphore.Weighted
	// stuck is set while the lock is that of a run whose processes do not end.
	stuck  atomic.Bool
	record Attachment
	// begun is set once ADD has, or may have: until then there is nothing to undo.
	// attached is set once it has succeeded, removed when the record is gone from the journal.
	begun, attached, removed bool
	// unwritten is set, once and for all, where its entry could not be written.
	unwritten bool
	// repeated is set while the background repeats its DEL, and hurried has it do so now.
	repeated atomic.Bool
	hurried  chan struct{}
	// released is set by Release. drift is what the last CHECK found, nil if nothing, and
	// guarded by CNI.mu.
	released atomic.Bool
	drift    *Drift
}

func newAttachment(record Attachment) *attachment {
	return &attachment{lock: semaphore.NewWeighted(1), record: record, hurried: make(chan struct{}, 1)}
}

// change changes the record of an attachment; its lock is held.
func (n *CNI) change(a *attachment, do func(*Attachment)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	do(&a.record)
}

func (n *CNI) openJournal() error {
	journal, err := state.Open[Attachment](n.journalDir(), journalVersion, true)
	if err != nil {
		return err
	}
	records, bad, err := journal.Load()
	if err != nil {
		return err
	}
	n.journal = journal
	for id, record := range records {
		if reason := n.foreign(id, record); reason != nil {
			b := journal.Quarantine(id, reason)
			n.options.Logger.Error("attachment quarantined: nothing of it is touched", "file", b.Path, "err", reason)
			continue
		}
		succeeded := addSucceeded(record)
		if !succeeded && record.Boot == n.bootID {
			record.NeverAttached = true // as far as a later boot knows, the disk may have lost it
		}
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

// foreign says why an entry is none of this node's: a copy under another name, or one
// that another node has written. Its DEL would free what a pod that runs has.
func (n *CNI) foreign(id string, record Attachment) error {
	switch {
	case record.ID != id:
		return fmt.Errorf("it is a copy of the entry of sandbox %q", record.ID)
	case record.Node != "" && record.Node != n.options.Mark:
		return fmt.Errorf("it is an entry of another node, %s, and this one is %s", record.Node, n.options.Mark)
	default:
		return nil
	}
}

// Quarantined are the files of attachments that cannot be decoded.
func (n *CNI) Quarantined() []string { return n.journal.Quarantined() }

// Journal writes the attachment down. ADD may run only after SyncJournal.
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

// supersede removes the namespaces of earlier tries of the same pod whose ADD failed and
// whose DEL is being repeated: however often a pod is tried, it has one.
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

// addSucceeded reports whether ADD did: libcni remembers what it answered as soon as
// all plugins have, and until DEL.
func addSucceeded(a Attachment) bool {
	_, err := os.Lstat(cachePath(a.Network, a.ID))
	return !errors.Is(err, fs.ErrNotExist)
}

// cachePath is where libcni keeps what ADD answered, once all plugins have.
func cachePath(network, id string) string {
	return filepath.Join(libcni.CacheDir, "results", network+"-"+id+"-"+eth0)
}

// SyncJournal makes the attachment of id durable; where there is none there is
// nothing to do.
func (n *CNI) SyncJournal(id string) error {
	if n.find(id) == nil {
		return nil
	}
	return n.journal.Sync(id)
}

// remove takes the attachment out of the journal; its lock is held.
func (n *CNI) remove(a *attachment) error {
	if err := n.journal.Remove(a.record.ID); err != nil {
		return fmt.Errorf("remove the attachment from the journal: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	a.removed = true
	a.hurry()
	delete(n.attachments, a.record.ID)
	return nil
}

func (n *CNI) find(id string) *attachment {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.attachments[id]
}

// Pending are the attachments whose DEL has failed and is being repeated, by
// id: what is left of pods that may be long gone.
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

// openUnreadable opens an attachment whose entry of the journal cannot be read. Its pod may
// run; its DEL gets what libcni remembers of its ADD. Where that is nothing ADD has not
// succeeded, and the entry stays for a person.
func (n *CNI) openUnreadable(bad state.Bad) {
	logger := n.options.Logger.With("sandbox", bad.ID, "file", bad.Path)
	logger.Error("attachment quarantined: it cannot be read", "err", bad.Reason)
	record, err := cachedAttachment(bad.ID)
	if err != nil {
		logger.Error("CNI DEL cannot be run: no configuration of its ADD is known; its addresses may have to be freed by hand", "err", err)
		return
	}
	logger = record.logger(n.options.Logger).With("file", bad.Path)
	logger.Warn("CNI DEL will run with the configuration that can still be found", "source", record.Source)
	a := newAttachment(record)
	a.begun, a.attached = true, true
	n.attachments[bad.ID] = a
	if _, err := os.Lstat(n.journal.Path(bad.ID)); err == nil {
		return // it is where it was, and may be readable the next time
	}
	if err := n.journal.Write(bad.ID, record); err != nil {
		a.unwritten = true
		logger.Error("the attachment is not in the journal on disk", "err", err)
	}
}

// cachedAttachment is what libcni's cache has of an ADD.
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
