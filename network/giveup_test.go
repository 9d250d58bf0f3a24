package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// A DEL that a changed configuration brings forward does not count: an administrator who repairs a file in several goes
// must not lose the attachment before the repair is done. The number of tries and the time both have to be over.
func TestDELsBroughtForwardDoNotCount(t *testing.T) {
	n := newScripted(t, func(o *Options) {
		o.Limits.GiveUpTries, o.Limits.GiveUpTime = 3, 0
		o.Limits.RetryFirst, o.Limits.RetryMost = time.Hour, time.Hour
	})
	n.tell(t, "ADD.fail")
	n.tell(t, "DEL.fail")
	n.retry(t, "web")
	n.runs(t)
	for i := range 8 {
		before := len(n.calls(t, "DEL"))
		plugin := n.script()
		plugin["edit"] = i
		n.configure(t, "10.conflist", "net", plugin)
		// The DEL with the configuration of ADD, and another one with that of now.
		harness.Eventually(t, "DEL runs again", func() bool { return len(n.calls(t, "DEL")) >= before+2 })
	}
	pending := n.Pending()
	harness.Want(t, len(pending) == 1 && pending[0].Tries == 1, "pending: %+v", pending)
}

// One try is one DEL, also after a restart, for which the journal has stored the configuration.
func TestOneDELForEachTry(t *testing.T) {
	n := newScripted(t, nil)
	n.tell(t, "ADD.fail")
	n.tell(t, "DEL.fail")
	n.retry(t, "web")
	n.reopen(t)
	before := len(n.calls(t, "DEL"))
	harness.WantError(t, n.Detach(t.Context(), "web", n.NamespacePath("web")), "try 2")
	harness.Same(t, "DELs of a try", len(n.calls(t, "DEL"))-before, 1)
}

func TestGivingUpTakesTriesAndTime(t *testing.T) {
	for _, c := range []struct {
		name  string
		tries int
		time  time.Duration
		gone  bool
	}{{"both over", 2, 0, true}, {"too few tries", 1000, 0, false}, {"too early", 2, time.Hour, false}} {
		t.Run(c.name, func(t *testing.T) {
			n := newScripted(t, func(o *Options) {
				o.Limits.GiveUpTries, o.Limits.GiveUpTime = c.tries, c.time
				o.Limits.RetryFirst, o.Limits.RetryMost = 10*time.Millisecond, 10*time.Millisecond
			})
			n.tell(t, "ADD.fail")
			n.tell(t, "DEL.fail")
			n.retry(t, "web")
			n.runs(t)
			harness.Eventually(t, "it is given up, or was tried often", func() bool {
				pending := n.Pending()
				return len(pending) == 0 || pending[0].Tries > 5
			})
			harness.Same(t, "given up", len(n.Pending()) == 0, c.gone)
		})
	}
}

// Many pods whose DEL fails for one reason are one line of the log, not one for each try of each.
func TestOutageIsOneLine(t *testing.T) {
	n := newScripted(t, func(o *Options) {
		o.Limits.RetryFirst, o.Limits.RetryMost = 10*time.Millisecond, 10*time.Millisecond
	})
	ids := []string{"a", "b", "c", "d"}
	for _, id := range ids {
		n.attached(t, id)
	}
	n.tell(t, "DEL.fail")
	n.runs(t)
	for _, id := range ids {
		n.Release(id)
	}
	harness.Eventually(t, "all were tried often", func() bool { return len(n.calls(t, "DEL")) > 40 })
	harness.Same(t, "lines of the log", strings.Count(n.log.String(), "CNI DEL failed again"), 1)
	failures := n.Failures()
	harness.Want(t, len(failures) == 1 && failures[Failed{"net", "DEL"}] >= 36, "failures: %v", failures)
}

// An address that host-local holds for a container that nobody has is freed by GC, also of a network before CNI 1.1. It
// stays if the container has an attachment, if another runtime's ADD has a result for it, or if it is new.
func TestLostAddresses(t *testing.T) {
	n := newNode(t, nil)
	chain := n.chain(t)[:1]
	text := marshal(t, map[string]any{"cniVersion": "1.0.0", "name": "net", "plugins": chain})
	put(t, filepath.Join(n.ConfDir, "10.conflist"), text)
	n.attached(t, "web")
	dir := filepath.Join(n.scripted, "ipam", "net")
	old := time.Now().Add(-time.Hour)
	for address, id := range map[string]string{
		"10.97.0.50": "lost", "10.97.0.51": "others", "10.97.0.52": "new", "fd00::5": "lost6",
	} {
		file := filepath.Join(dir, address)
		put(t, file, id+"\r\neth0")
		if id != "new" {
			must(t, os.Chtimes(file, old, old))
		}
	}
	must(t, os.Chtimes(filepath.Join(dir, n.given["web"][0].String()), old, old))
	others := CachePath("", "net", "others")
	must(t, os.MkdirAll(filepath.Dir(others), 0o700))
	put(t, others, "{}")
	configuration, err := n.Configuration()
	must(t, err)
	lost, err := LostAddresses(configuration.Bytes, "", func(id string) bool { return n.find(id) != nil })
	must(t, err)
	var found []string
	for _, a := range lost {
		found = append(found, a.ID)
	}
	harness.Same(t, "lost", strings.Join(found, " "), "lost new lost6")
	n.collect(t.Context(), configuration)
	for _, name := range []string{"10.97.0.50", "fd00::5"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		harness.Want(t, os.IsNotExist(err), "%s is still held", name)
	}
	for _, name := range []string{"10.97.0.51", "10.97.0.52", n.given["web"][0].String()} {
		_, err := os.Lstat(filepath.Join(dir, name))
		harness.Want(t, err == nil, "%s was freed", name)
	}
	n.detach(t, "web")
}
