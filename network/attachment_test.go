package network

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
)

// The pauses between the DELs of the background grow up to a limit. One that is hurried begins at once, and counts anew.
func TestPausesBetweenDELs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, a := &CNI{base: t.Context(), journal: &state.Records[Attachment]{}}, newAttachment(Attachment{})
		a.unwritten = true // else it would be given up
		n.SetLimits(Limits{RetryFirst: 100 * time.Millisecond, RetryMost: time.Second})
		var waited []time.Duration
		for pauses := range 6 {
			began := time.Now()
			harness.Same(t, "pauses", n.awaitTry(a, pauses), pauses+1)
			waited = append(waited, time.Since(began)/time.Millisecond)
		}
		harness.Same(t, "milliseconds", waited, []time.Duration{100, 200, 400, 800, 1000, 1000})
		notify(a.hurried)
		harness.Same(t, "pauses of one that is hurried", n.awaitTry(a, 6), 0)
	})
}

// A DEL that fails is retried in the background, over a restart too, and the log says for which pod.
func TestDetachFailsAndThenWorks(t *testing.T) {
	n := newScripted(t, nil)
	n.attached(t, "web")
	stop := n.runs(t)
	n.tell(t, "DEL.fail")
	harness.WantError(t, n.Detach(t.Context(), "web", n.NamespacePath("web")), "CNI DEL", "told to fail", "try 1", "retried in the background")
	harness.Eventually(t, "the log says for which pod", func() bool {
		return len(n.calls(t, "DEL")) >= 3 && strings.Contains(n.log.String(), `msg="CNI DEL failed again" pod=web sandbox=web network=net`)
	})
	stop()
	must(t, n.Options.Namespaces.Remove("web"))
	n.reopen(t)
	again := n.Pending()
	harness.Want(t, len(again) == 1 && again[0].Tries >= 3, "after a restart %+v", again)
	n.untell(t, "DEL.fail")
	n.runs(t)
	harness.Eventually(t, "the attachment is struck out", func() bool { return n.find("web") == nil })
	last := n.calls(t, "DEL")
	harness.Want(t, strings.Contains(last[len(last)-1], "netns= "),
		"DEL after the namespace was gone: %q, want an empty CNI_NETNS", last[len(last)-1])
	_, err := os.Stat(n.journal.Path("web"))
	harness.Want(t, os.IsNotExist(err), "the journal's file: %v", err)
	n.detach(t, "web")
	harness.Same(t, "DELs after one that succeeded", n.calls(t, "DEL"), last)
}

// The tries of the background do not count: a DEL that fails blocks its pod's deletion for the time of the limits.
func TestDetachTimeMeansWhatItSays(t *testing.T) {
	n := newNode(t, func(o *Options) {
		o.Limits.RetryFirst, o.Limits.RetryMost = time.Millisecond, time.Millisecond
		o.Limits.DetachTries, o.Limits.DetachTime = 1000, time.Hour
	})
	n.configure(t, "10.conflist", "net", n.script())
	n.attached(t, "web")
	n.tell(t, "DEL.fail")
	n.runs(t)
	harness.WantError(t, n.Detach(t.Context(), "web", ""), "told to fail")
	harness.Eventually(t, "the background has tried often", func() bool {
		pending := n.Pending()
		return len(pending) == 1 && pending[0].Tries > 10
	})
	harness.WantError(t, n.Detach(t.Context(), "web", ""), "told to fail")
	limits := n.Options.Limits
	limits.DetachTime = 0
	n.SetLimits(limits)
	n.detach(t, "web")
	harness.Same(t, "attachments that wait", len(n.Pending()), 1)
}

// DELs that hang leave room for others.
func TestHangingDELsHoldUpNoOther(t *testing.T) {
	n := newScripted(t, nil)
	for i := range atOnce / 2 {
		id := "hang" + strconv.Itoa(i)
		n.attached(t, id)
	}
	n.attached(t, "web")
	n.tell(t, "DEL.hang")
	n.runs(t)
	for i := range atOnce / 2 {
		n.Release("hang" + strconv.Itoa(i))
	}
	harness.Eventually(t, "DELs hang", func() bool { return len(n.calls(t, "DEL")) == atOnce/2 })
	n.untell(t, "DEL.hang")
	n.Release("web")
	harness.Eventually(t, "the other is free", func() bool { return n.find("web") == nil })
	hung := processesWith(t, mark(), "CNI_COMMAND=DEL")
	harness.Want(t, len(hung) >= atOnce/2, "DELs do not hang any more: %q", hung)
	for _, process := range hung {
		pid, _, _ := strings.Cut(process, " ")
		must(t, exec.Command("kill", "-KILL", pid).Run())
	}
	harness.Eventually(t, "those that hung are free too", func() bool { return len(n.ids()) == 0 && len(n.runDirs(t)) == 0 })
}

// in runs a function in the network namespace at path.
func in(t *testing.T, path string, do func() error) {
	handle, err := netns.GetFromPath(path)
	must(t, err)
	defer handle.Close()
	err = process.OnDisposableThread(func() error {
		if err := netns.Set(handle); err != nil {
			return err
		}
		return do()
	})
	must(t, err)
}

func rules(t *testing.T) (rules []string) {
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		out, err := exec.Command(program).Output()
		must(t, err)
		rules = append(rules, strings.Split(string(out), "\n")...)
	}
	return rules
}

// without lists what is new and has one of the marks in it.
func without(now, before []string, marks ...string) (left []string) {
	for _, line := range now {
		if slices.ContainsFunc(marks, func(mark string) bool { return strings.Contains(line, mark) }) && !slices.Contains(before, line) {
			left = append(left, line)
		}
	}
	return left
}

func removeLinkAtEnd(t *testing.T, name string) {
	t.Cleanup(func() {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		missing := netlink.LinkNotFoundError{}
		harness.Want(t, err == nil || errors.As(err, &missing), "%v", err)
	})
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }

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
	harness.Eventually(t, "the unknown one is released", func() bool { return n.find("gone") == nil })
	held := n.addresses(t)
	harness.Want(t, len(held) == 2 && len(n.calls(t, "DEL")) == 1 && n.find("web") != nil, "addresses %q, DELs %q", held, n.calls(t, "DEL"))
	harness.Same(t, "records quarantined", len(n.Quarantined()), 3)
	n.detach(t, "db")
	n.detach(t, "web")
	harness.Same(t, "addresses", n.addresses(t), nil)
}

// impossible is a chain whose ADD and DEL can never succeed: a range that begins outside of its subnet.
func (n *node) impossible(t *testing.T) []map[string]any {
	chain := n.chain(t)
	chain[0]["ipam"].(map[string]any)["ranges"] = []any{[]any{map[string]string{"subnet": "10.97.0.0/24", "rangeStart": "10.98.0.9"}}}
	return chain
}

// retry is one try of a pod as sandbox.Run has it: ADD fails, and is undone.
func (n *node) retry(t *testing.T, id string, between ...func()) {
	n.journalled(t, id, func(a *Attachment) {
		a.Args = map[string]string{"IgnoreUnknown": "1", "K8S_POD_NAME": "web", "K8S_POD_NAMESPACE": "default", "K8S_POD_UID": "uid"}
	})
	_, err := n.try(t.Context(), id)
	harness.Need(t, err != nil, "ADD succeeded")
	for _, do := range between {
		do()
	}
	if err := n.Detach(t.Context(), id, n.NamespacePath(id)); err != nil {
		n.Release(id)
	}
}

func (n *node) pinned(t *testing.T) []string {
	ids, err := n.Options.Namespaces.(*namespace.Dir).IDs()
	must(t, err)
	return ids
}

func (n *node) entries(t *testing.T) []string {
	return harness.Glob(t, n.Options.Root, "attachments", "*.json")
}

// Forty tries of a pod whose network can never work hold one namespace at most, and leave nothing when their DEL
// has failed often enough; also over a restart, and the log and the timeline tell.
func TestWhatNeverWorkedLeavesNothing(t *testing.T) {
	for _, broken := range []string{"a range outside of its subnet", "a plugin that is not installed"} {
		t.Run(broken, func(t *testing.T) {
			var mu sync.Mutex
			rows := make(map[string][]step.Row)
			n := newNode(t, func(o *Options) {
				o.Limits.GiveUpTries, o.Limits.GiveUpTime = 4, 0
				o.Limits.RetryFirst, o.Limits.RetryMost = 300*time.Millisecond, 300*time.Millisecond
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
				n.retry(t, fmt.Sprint("try", i))
				pinned := n.pinned(t)
				harness.Need(t, len(pinned) <= 1, "namespaces of one pod: %q", pinned)
			}
			n.runs(t)
			harness.Eventually(t, "nothing is left", func() bool { return len(n.entries(t)) == 0 && len(n.pinned(t)) == 0 && len(n.Pending()) == 0 })
			remount := func(flags uintptr) {
				must(t, unix.Mount("", filepath.Dir(n.Options.Namespaces.Path("stays")), "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""))
			}
			n.retry(t, "stays", func() { remount(unix.MS_RDONLY) })
			harness.Eventually(t, "the log tells of a namespace that cannot be removed", func() bool {
				return strings.Contains(n.log.String(), "the network namespace of a removed attachment stays")
			})
			remount(0)
			mu.Lock()
			defer mu.Unlock()
			last := rows["try39"]
			harness.Want(t, len(last) == 1 && last[0].Step == "give up attachment" && strings.Contains(last[0].Error, "may be left"), "rows %+v", last)
			harness.Want(t, strings.Contains(n.log.String(), "an attachment is given up"), "the log does not tell")
			harness.Same(t, "addresses", n.addresses(t), nil)
		})
	}
}

// When the configuration is corrected, its network's DEL undoes what was tried with the one that was wrong.
func TestCorrectedConfigurationUndoesWhatFailed(t *testing.T) {
	n := newNode(t, func(o *Options) { o.Limits.RetryFirst, o.Limits.RetryMost = time.Hour, time.Hour })
	n.configure(t, "10.conflist", "net", n.impossible(t)...)
	n.retry(t, "web")
	n.runs(t)
	harness.Need(t, len(n.Pending()) == 1, "its DEL succeeded")
	n.configure(t, "10.conflist", "net", n.chain(t)...)
	harness.Eventually(t, "nothing is left", func() bool { return len(n.entries(t)) == 0 && len(n.pinned(t)) == 0 })
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
		harness.Eventually(t, "DEL was tried", func() bool { return len(n.calls(t, "DEL")) > tries+4 })
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
	harness.Eventually(t, "DEL is tried again", func() bool { return len(n.calls(t, "DEL")) > tries+4 })
	n.untell(t, "DEL.fail")
	harness.Eventually(t, "it is detached", func() bool { return len(n.Pending()) == 0 })
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
