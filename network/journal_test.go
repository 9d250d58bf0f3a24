package network

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// An attachment is on disk when Journal returns, whole.
func TestJournalSurvivesARestart(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", func(a *Attachment) { must(t, a.SetCapability("dns", DNS{Servers: []string{"::1"}})) })
	before := n.find("web").record
	n.reopen(t)
	after := n.find("web")
	if after == nil || marshal(t, after.record) != marshal(t, before) {
		t.Errorf("after a restart %+v, before %+v", after, before)
	}
	if len(n.Pending()) != 0 {
		t.Error("what nobody released is pending")
	}
}

// A line that cannot be read is set aside and stops no other.
func TestSpoiltJournal(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	spoilt := filepath.Join(n.journalDir(), "spoilt.json")
	put(t, spoilt, `{"version": 1, "rec`)
	n.reopen(t)
	if n.find("web") == nil || n.find("spoilt") != nil {
		t.Error("the journal lost a good line or took a bad one")
	}
	if _, err := os.Stat(filepath.Join(n.journalDir(), "quarantine", "spoilt.json")); err != nil {
		t.Error(err)
	}
	n.attach(t, "web")
	n.detach(t, "web")
}

// Pending waits for nobody: not for a plugin that hangs.
func TestPendingDoesNotWait(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.Del = 2 * time.Second })
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	n.tell(t, "DEL.hang")
	done := make(chan error, 1)
	go func() { done <- n.Detach(t.Context(), "web", "") }()
	eventually(t, within, "DEL hangs", func() bool { return len(n.calls(t, "DEL")) == 1 })
	began := time.Now()
	n.Pending()
	if took := time.Since(began); took > 100*time.Millisecond {
		t.Errorf("Pending took %v", took)
	}
	wantError(t, <-done, "not done after 2s")
}
