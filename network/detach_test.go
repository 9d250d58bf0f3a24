package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// DEL gets the configuration of ADD, whatever the directory says by then.
func TestDetachUsesTheConfigurationOfAdd(t *testing.T) {
	for name, spoil := range map[string]func(*testing.T, *node){
		"the file is gone": func(t *testing.T, n *node) {
			must(t, os.Remove(filepath.Join(n.ConfDir, "10.conflist")))
		},
		"the directory is gone": func(t *testing.T, n *node) { must(t, os.RemoveAll(n.ConfDir)) },
		"another network": func(t *testing.T, n *node) {
			n.configure(t, "10.conflist", "other", map[string]any{"type": "bridge"})
		},
		"the same network with other plugins": func(t *testing.T, n *node) {
			n.configure(t, "10.conflist", "net", map[string]any{"type": "bridge"})
		},
		"garbage": func(t *testing.T, n *node) { put(t, filepath.Join(n.ConfDir, "10.conflist"), "garbage") },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, nil)
			n.configure(t, "10.conflist", "net", n.script())
			n.journalled(t, "web", nil)
			n.attach(t, "web")
			spoil(t, n)
			n.Reload()
			n.reopen(t)
			n.detach(t, "web")
			if calls := n.calls(t, "DEL"); len(calls) != 1 {
				t.Errorf("DEL ran as %q", calls)
			}
			if n.find("web") != nil {
				t.Error("still in the journal")
			}
		})
	}
}

// A DEL that fails is told of, repeated in the background with longer and
// longer pauses, over a restart too, and struck out when it works at last.
func TestDetachFailsAndThenWorks(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	n.attach(t, "web")
	stop := n.runs(t)
	n.tell(t, "DEL.fail")
	wantError(t, n.Detach(t.Context(), "web", n.NamespacePath("web")), "CNI DEL", "told to fail", "try 1", "repeated in the background")

	// Pauses of 0, 100, 200, 400, 800 ms.
	time.Sleep(1200 * time.Millisecond)
	calls := len(n.calls(t, "DEL"))
	if calls < 3 || calls > 6 {
		t.Errorf("%d DELs in 1.2 s", calls)
	}
	var pending []Attachment
	eventually(t, within, "it is pending, and no plugin runs for it", func() bool {
		pending = n.Pending()
		return len(pending) == 1
	})
	if pending[0].ID != "web" || pending[0].Tries < 3 || pending[0].FirstFailure.IsZero() || !strings.Contains(pending[0].LastError, "told to fail") {
		t.Fatalf("pending %+v", pending)
	}

	stop()
	must(t, n.Options.Namespaces.Remove("web"))
	n.reopen(t)
	if again := n.Pending(); len(again) != 1 || again[0].Tries < pending[0].Tries || !again[0].FirstFailure.Equal(pending[0].FirstFailure) {
		t.Errorf("after a restart %+v, before %+v", again, pending)
	}
	n.untell(t, "DEL.fail")
	n.runs(t)
	eventually(t, within, "the attachment is struck out", func() bool { return n.find("web") == nil })
	last := n.calls(t, "DEL")
	if !strings.Contains(last[len(last)-1], "netns= ") {
		t.Errorf("DEL after the namespace was gone: %q, want an empty CNI_NETNS", last[len(last)-1])
	}
	if _, err := os.Stat(n.journal.Path("web")); !os.IsNotExist(err) {
		t.Errorf("the journal's file: %v", err)
	}
	n.detach(t, "web")
	if now := n.calls(t, "DEL"); len(now) != len(last) {
		t.Errorf("DEL ran again: %q", now)
	}
}

// After so many tries a failing DEL blocks a pod's deletion no longer; the
// attachment is not forgotten.
func TestDetachLosesPatienceAfterTries(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.DetachTries = 3 })
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	n.attach(t, "web")
	n.tell(t, "DEL.fail")
	for _, try := range []string{"try 1", "try 2"} {
		wantError(t, n.Detach(t.Context(), "web", ""), try)
	}
	for range 3 {
		n.detach(t, "web")
	}
	if calls := n.calls(t, "DEL"); len(calls) != 3 {
		t.Errorf("%d DELs, want 3", len(calls))
	}
	if pending := n.Pending(); len(pending) != 1 || pending[0].Tries != 3 {
		t.Errorf("pending %+v", pending)
	}
	if !strings.Contains(n.log.String(), "goes on without CNI DEL") {
		t.Error("nothing in the log")
	}
	n.untell(t, "DEL.fail")
	n.reopen(t)
	n.runs(t)
	eventually(t, within, "the attachment is struck out", func() bool { return len(n.Pending()) == 0 && n.find("web") == nil })
}

func TestDetachLosesPatienceAfterTime(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.DetachTries, o.Limits.DetachTime = 1000, 300*time.Millisecond })
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	n.attach(t, "web")
	n.tell(t, "DEL.fail")
	wantError(t, n.Detach(t.Context(), "web", ""), "try 1")
	time.Sleep(n.Limits.DetachTime)
	n.detach(t, "web")
	if pending := n.Pending(); len(pending) != 1 {
		t.Errorf("pending %+v", pending)
	}
}

// Release is for what nobody will ask for again.
func TestReleaseUnknown(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	for _, id := range []string{"known", "lost"} {
		n.journalled(t, id, nil)
		n.attach(t, id)
	}
	n.reopen(t)
	n.runs(t)
	n.ReleaseUnknown(func(id string) bool { return id == "known" })
	eventually(t, within, "the lost one is released", func() bool { return n.find("lost") == nil })
	if n.find("known") == nil || len(n.calls(t, "DEL")) != 1 {
		t.Errorf("DELs: %q", n.calls(t, "DEL"))
	}
	n.Release("nobody")
}
