package network

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// An entry that cannot be read, or that is gone, stops no other, and its DEL is run with what libcni remembers of its ADD.
func TestUnreadableAttachment(t *testing.T) {
	n := newScripted(t, nil)
	for _, id := range []string{"web", "spoilt", "lost"} {
		n.attached(t, id)
	}
	added := n.calls(t, "ADD")
	put(t, n.journal.Path("spoilt"), `{"version": 1, "rec`)
	must(t, os.Remove(n.journal.Path("lost")))
	n.configure(t, "10.conflist", "another", map[string]any{"type": "bridge"})
	for range 2 { // it is in the journal from then on
		n.reopen(t)
		n.KnowAttached("lost")
		harness.Need(t, n.find("web") != nil && n.find("spoilt") != nil && n.find("lost") != nil, "an attachment is lost")
	}
	harness.Want(t, strings.Contains(n.log.String(), "libcni's cache"), "nothing in the log")
	_, err := os.Stat(filepath.Join(n.journalDir(), "quarantine", "spoilt.json"))
	harness.Check(t, err)
	for i, id := range []string{"spoilt", "lost"} {
		n.detach(t, id)
		calls := n.calls(t, "DEL")
		harness.Want(t, len(calls) == i+1 && sorted(calls[i]) == sorted(strings.Replace(added[i+1], "ADD", "DEL", 1)), "DEL ran as %q after %q", calls, added)
		n.KnowAttached(id)
		harness.Want(t, n.find(id) == nil, "an attachment is known after its DEL")
	}
	n.detach(t, "web")
}

// sorted is a call with its arguments in the order of the alphabet: they have none of their own.
func sorted(call string) string {
	parts := strings.FieldsFunc(call, func(r rune) bool { return r == ';' || r == ' ' || r == '=' })
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// A copy of an entry under another name, and one of another node, are put aside: their
// DEL would free what a pod that runs has. A pod whose own entry a copy has replaced keeps its DEL.
func TestEntryThatIsNoneOfThisNodes(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.chain(t)...)
	for _, id := range []string{"web", "gone", "db"} {
		n.attached(t, id)
	}
	data := harness.Read(t, n.journal.Path("web"))
	put(t, n.journal.Path("backup-of-web"), string(data))
	put(t, n.journal.Path("db"), string(data))
	foreign := strings.ReplaceAll(strings.ReplaceAll(string(data), "minicri-cni-", "minicri-cni-other-"), "\"web\"", "\"theirs\"")
	put(t, n.journal.Path("theirs"), foreign)
	n.reopen(t)
	n.runs(t)
	n.ReleaseUnknown(func(id string) bool { return id != "gone" })
	// What would run begins at once, beside the DEL of one that no pod has.
	eventually(t, within, "the unknown one is released", func() bool { return n.find("gone") == nil })
	held := n.addresses(t)
	harness.Want(t, len(held) == 2 && len(n.calls(t, "DEL")) == 1 && n.find("web") != nil, "addresses %q, DELs %q", held, n.calls(t, "DEL"))
	harness.Same(t, "records quarantined", len(n.Quarantined()), 3)
	n.detach(t, "db")
	n.detach(t, "web")
	harness.Same(t, "addresses", n.addresses(t), nil)
}
