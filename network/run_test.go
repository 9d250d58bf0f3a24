package network

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
)

// swallowed are texts of errors that go-cni takes for success.
var swallowed = []string{
	`clusterinformations.crd.projectcalico.org \"default\" not found`, "endpoint of this container not found",
	"dial unix /run/agent/agent.sock: connect: no such file or directory",
}

// A DEL that fails has failed, whatever its text, with a namespace and without.
func TestDELThatFailsHasFailedWhateverItSays(t *testing.T) {
	for _, text := range swallowed {
		for _, path := range []string{"alive", ""} {
			n := newScripted(t, nil)
			n.attached(t, "web")
			put(t, filepath.Join(n.scripted, "DEL.fail"), text)
			if path != "" {
				path = n.NamespacePath("web")
			}
			harness.WantError(t, n.Detach(t.Context(), "web", path), "CNI DEL", "plugin scripted", strings.ReplaceAll(text, `\`, ""), "CNI error code 11", "try 1")
			harness.Want(t, n.find("web") != nil && len(n.Pending()) == 1, "%q: the attachment is gone after a DEL that failed", text)
			n.untell(t, "DEL.fail")
			n.detach(t, "web")
		}
	}
}

// chain is bridge with host-local, and then the plugin "scripted".
func (n *node) chain(t *testing.T) []map[string]any {
	return []map[string]any{
		{"type": "bridge", "bridge": "br-chain", "ipam": map[string]any{
			"type": "host-local", "dataDir": filepath.Join(n.scripted, "ipam"),
			"ranges": []any{[]any{map[string]string{"subnet": "10.97.0.0/24"}}},
		}},
		n.script(),
	}
}

// addresses are those that host-local holds.
func (n *node) addresses(t *testing.T) (held []string) {
	files, err := filepath.Glob(filepath.Join(n.scripted, "ipam", "*", "10.97.*"))
	must(t, err)
	for _, file := range files {
		held = append(held, filepath.Base(file))
	}
	return held
}

// helper waits for the child that the plugin has left behind.
func (n *node) helper(t *testing.T) (pid int) {
	eventually(t, within, "the helper runs", func() bool {
		data, _ := os.ReadFile(filepath.Join(n.scripted, "helper"))
		pid, _ = strconv.Atoi(strings.TrimSpace(string(data)))
		return pid > 0
	})
	return pid
}

func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// What a plugin leaves running for its pod is left alone: by Attach, which does
// not wait for it, by the next daemon, by CHECK that fails, by DEL.
func TestHelperOfAPluginLives(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.Check = time.Second })
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.helper")
	n.attach(t, "web")
	helper := n.helper(t)
	t.Cleanup(func() { _ = unix.Kill(helper, unix.SIGKILL) })
	n.reopen(t)
	n.runs(t)
	n.tell(t, "CHECK.hang")
	n.RequestCheck()
	eventually(t, within, "CHECK is ended", func() bool { return len(n.Drifted()) == 1 })
	n.detach(t, "web")
	harness.Want(t, alive(helper), "the helper was ended, or DEL has waited for its end")
	must(t, unix.Kill(helper, unix.SIGKILL))
	eventually(t, within, "the run of the helper is removed", func() bool { return len(n.runDirs(t)) == 0 })
}

// runDirs are the cgroups of runs.
func (n *node) runDirs(t *testing.T) []string {
	parent, err := cgroup.GroupParent(n.Options.CgroupParent)
	must(t, err)
	dirs, err := filepath.Glob(filepath.Join(parent.Dir, n.Options.Mark+"*"))
	must(t, err)
	return dirs
}

// A network before CNI 0.4.0, as flannel's manifests have it, has no CHECK: nothing is noted of it.
func TestCheckOfAnOldNetworkNotesNothing(t *testing.T) {
	n := newNode(t, nil)
	put(t, filepath.Join(n.ConfDir, "10.conflist"), marshal(t, map[string]any{"cniVersion": "0.3.1", "name": "net", "plugins": n.chain(t)[:1]}))
	n.attached(t, "web")
	n.check("web")
	harness.Same(t, "drifted", n.Drifted(), nil)
	n.detach(t, "web")
}

// statusLimit is the limit of a STATUS that hangs.
const statusLimit = 500 * time.Millisecond

func (n *node) limitStatus(t *testing.T, limit time.Duration) {
	limits := n.Options.Limits
	limits.Status = limit
	n.SetLimits(limits)
}

// A daemon that ends while plugins are asked for STATUS, or collect, leaves nothing of
// that to the next one: Close waits until it is killed and removed.
func TestCloseInsideARunOfTheNetwork(t *testing.T) {
	for _, verb := range []string{"STATUS", "GC"} {
		n := newNode(t, func(o *Options) { o.Limits.GCPeriod = often })
		n.tell(t, verb+".hang")
		n.configure(t, "10.conflist", "net", n.script())
		n.reopen(t)
		n.runs(t)
		eventually(t, within, verb+" hangs", func() bool { return len(processesWith(t, mark(), "CNI_COMMAND="+verb)) > 0 })
		n.Close()
		harness.Same(t, "left of "+verb, n.runDirs(t), nil)
	}
}

// Before CNI 1.1 there is no STATUS; that the programs are there has to do.
func TestStatusOfOlderNetworks(t *testing.T) {
	n := newNode(t, nil)
	n.tell(t, "STATUS.fail")
	old := marshal(t, map[string]any{"cniVersion": "1.0.0", "name": "old", "plugins": []any{n.script()}})
	put(t, n.ConfDir+"/10.conflist", old)
	n.reopen(t)
	n.refreshStatus()
	harness.Check(t, n.ready(t))
	harness.Same(t, "asked all the same", n.calls(t, "STATUS"), nil)
	put(t, n.ConfDir+"/10.conflist", strings.ReplaceAll(old, "scripted", "missing"))
	n.reopen(t)
	n.refreshStatus()
	harness.WantError(t, n.ready(t), "missing", "install the plugin")
}

// After a start there is no verdict before the plugins have answered, however long they take within the limit.
func TestNoVerdictBeforeTheFirstAnswer(t *testing.T) {
	n := newScripted(t, func(o *Options) { o.Limits.Status = within })
	n.tell(t, "STATUS.slow")
	n.reopen(t)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	harness.WantError(t, n.Ready(short), "not answered STATUS yet")
	n.runs(t)
	harness.Check(t, n.ready(t))
}

// One answer that does not come in time says nothing; the second one does.
func TestOneSlowStatusIsNoVerdict(t *testing.T) {
	n := newScripted(t, nil)
	n.reopen(t)
	n.refreshStatus()
	n.limitStatus(t, statusLimit)
	n.tell(t, "STATUS.hang")
	n.refreshStatus()
	harness.Check(t, n.ready(t))
	n.refreshStatus()
	harness.WantError(t, n.ready(t), "not done after 500ms")
	n.untell(t, "STATUS.hang")
	n.limitStatus(t, within)
	n.refreshStatus()
	harness.Check(t, n.ready(t))
}
