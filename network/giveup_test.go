package network

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/harness"
)

// impossible is a chain whose ADD and DEL can never succeed: a range that begins outside of its subnet.
func (n *node) impossible(t *testing.T) []map[string]any {
	chain := n.chain(t)
	chain[0]["ipam"].(map[string]any)["ranges"] = []any{[]any{map[string]string{"subnet": "10.97.0.0/24", "rangeStart": "10.98.0.9"}}}
	return chain
}

// try is one try of a pod as sandbox.Run has it: ADD fails, and is undone.
func (n *node) try(t *testing.T, id string, between ...func()) {
	n.journalled(t, id, func(a *Attachment) {
		a.Args = map[string]string{"IgnoreUnknown": "1", "K8S_POD_NAME": "web", "K8S_POD_NAMESPACE": "default", "K8S_POD_UID": "uid"}
	})
	_, err := n.Attach(t.Context(), id, n.Options.Namespaces.Path(id))
	harness.Need(t, err != nil, "ADD succeeded")
	for _, do := range between {
		do()
	}
	if err := n.Detach(t.Context(), id, n.NamespacePath(id)); err != nil {
		n.Release(id)
	}
}

func (n *node) pinned(t *testing.T) []string {
	ids, err := n.Options.Namespaces.IDs()
	must(t, err)
	return ids
}

func (n *node) entries(t *testing.T) []string {
	files, err := filepath.Glob(filepath.Join(n.Options.Root, "attachments", "*.json"))
	must(t, err)
	return files
}

// Forty tries of a pod whose network can never work hold one namespace at most, and leave nothing when their DEL
// has failed often enough; also over a restart, and the log and the timeline tell.
func TestWhatNeverWorkedLeavesNothing(t *testing.T) {
	for _, broken := range []string{"a range outside of its subnet", "a plugin that is not installed"} {
		t.Run(broken, func(t *testing.T) {
			var mu sync.Mutex
			rows := make(map[string][]step.Row)
			n := newNode(t, func(o *Options) {
				o.Limits.GiveUpTries, o.Limits.RetryFirst, o.Limits.RetryMost = 4, 300*time.Millisecond, 300*time.Millisecond
				o.Later = func(id string, row step.Row) {
					mu.Lock()
					defer mu.Unlock()
					rows[id] = append(rows[id], row)
				}
			})
			if broken == "a plugin that is not installed" {
				n.configure(t, "10.conflist", "net", n.chain(t)[0], map[string]any{"type": "istio-cni"})
			} else {
				n.configure(t, "10.conflist", "net", n.impossible(t)...)
			}
			for i := range 40 {
				if i == 20 {
					n.reopen(t)
				}
				n.try(t, fmt.Sprint("try", i))
				pinned := n.pinned(t)
				harness.Need(t, len(pinned) <= 1, "namespaces of one pod: %q", pinned)
			}
			n.runs(t)
			eventually(t, within, "nothing is left", func() bool { return len(n.entries(t)) == 0 && len(n.pinned(t)) == 0 && len(n.Pending()) == 0 })
			remount := func(flags uintptr) {
				must(t, unix.Mount("", filepath.Dir(n.Options.Namespaces.Path("stays")), "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""))
			}
			n.try(t, "stays", func() { remount(unix.MS_RDONLY) })
			eventually(t, within, "the log tells of a namespace that cannot be removed", func() bool {
				return strings.Contains(n.log.String(), "the network namespace of a removed attachment stays")
			})
			remount(0)
			mu.Lock()
			defer mu.Unlock()
			if last := rows["try39"]; len(last) != 1 || last[0].Step != "give up attachment" || !strings.Contains(last[0].Error, "may be left") {
				t.Errorf("rows %+v", last)
			}
			harness.Want(t, strings.Contains(n.log.String(), "an attachment is given up"), "the log does not tell")
			harness.Same(t, "addresses", n.addresses(t), nil)
		})
	}
}

// When the configuration is corrected, its network's DEL undoes what was tried with the one that was wrong.
func TestCorrectedConfigurationUndoesWhatFailed(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.RetryFirst, o.Limits.RetryMost = time.Hour, time.Hour })
	n.configure(t, "10.conflist", "net", n.impossible(t)...)
	n.try(t, "web")
	n.runs(t)
	harness.Need(t, len(n.Pending()) == 1, "its DEL succeeded")
	n.configure(t, "10.conflist", "net", n.chain(t)...)
	eventually(t, within, "nothing is left", func() bool { return len(n.entries(t)) == 0 && len(n.pinned(t)) == 0 })
	harness.Want(t, !strings.Contains(n.log.String(), "given up"), "it was given up")
}

// An attachment whose ADD succeeded is kept until its DEL has, over restarts too: its address is never lost.
func TestWhatWasAttachedIsNotGivenUp(t *testing.T) {
	n := newNode(t, func(o *Options) {
		o.Limits.GiveUpTries, o.Limits.GiveUpTime, o.Limits.RetryFirst, o.Limits.RetryMost = 2, time.Nanosecond, 10*time.Millisecond, 10*time.Millisecond
	})
	n.configure(t, "10.conflist", "net", n.chain(t)...)
	n.attached(t, "web")
	n.tell(t, "DEL.fail")
	for range 2 {
		n.Release("web")
		stop := n.runs(t)
		tries := len(n.calls(t, "DEL"))
		eventually(t, within, "DEL was tried", func() bool { return len(n.calls(t, "DEL")) > tries+4 })
		stop()
		n.reopen(t)
	}
	harness.Want(t, len(n.entries(t)) == 1 && len(n.pinned(t)) == 1, "entries %q, namespaces %q", n.entries(t), n.pinned(t))
	n.untell(t, "DEL.fail")
	n.detach(t, "web")
}

// An attachment whose entry is not on disk because the disk is full was given up by nobody: its DEL is tried again.
func TestWhatCannotBeWrittenIsNotGivenUp(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.RetryFirst, o.Limits.RetryMost = 10*time.Millisecond, 10*time.Millisecond })
	n.configure(t, "10.conflist", "net", n.chain(t)...)
	n.attached(t, "web")
	journal := filepath.Dir(n.journal.Path("web"))
	must(t, unix.Mount("tmpfs", journal, "tmpfs", 0, "nr_inodes=3")) // the directory, its quarantine and the bad entry
	t.Cleanup(func() { must(t, unix.Unmount(journal, unix.MNT_DETACH)) })
	must(t, os.WriteFile(n.journal.Path("web"), []byte("no JSON"), 0o600))
	n.reopen(t)
	n.tell(t, "DEL.fail")
	err := n.Detach(t.Context(), "web", n.NamespacePath("web"))
	harness.Need(t, err != nil, "DEL succeeds: this shows nothing")
	_, err = os.Lstat(n.journal.Path("web"))
	harness.Need(t, err != nil, "its entry is there: this shows nothing")
	n.runs(t)
	tries := len(n.calls(t, "DEL"))
	eventually(t, within, "DEL is tried again", func() bool { return len(n.calls(t, "DEL")) > tries+4 })
	n.untell(t, "DEL.fail")
	eventually(t, within, "it is detached", func() bool { return len(n.Pending()) == 0 })
	harness.Want(t, !strings.Contains(n.log.String(), "given up") && len(n.addresses(t)) == 0, "its addresses are %q", n.addresses(t))
}

// Where ADD has not even begun there is nothing to undo, and no plugin is run for it.
func TestWhatNeverBeganHasNoDEL(t *testing.T) {
	n := newScripted(t, nil)
	n.journalled(t, "web", nil)
	n.detach(t, "web")
	calls := n.calls(t, "DEL")
	harness.Want(t, len(calls) == 0 && len(n.entries(t)) == 0, "calls %q, entries %q", calls, n.entries(t))
}
