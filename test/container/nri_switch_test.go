package container

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// reload puts other keys of [nri] into force, and waits until they are.
func (n *nriNode) reload(keys string) {
	n.t.Helper()
	reload(n.t, n.Node, "[nri]\n"+keys)
}

// isOn reports whether Status shows plugins, be there none.
func (n *nriNode) isOn() bool {
	n.t.Helper()
	return harness.Info[any](n.t, n.Node, "nriPlugins") != nil
}

// withoutPlugins switches NRI off and on, and leaves it without those that the daemon
// starts.
func (n *nriNode) withoutPlugins(names ...string) {
	n.t.Helper()
	n.reload("enabled = false\n")
	for _, name := range names {
		check(n.t, os.Remove(filepath.Join(n.dir, "plugins", name)))
	}
	n.reload("enabled = true\n")
}

// NRI is switched off and on, and over to another socket, without a restart:
// plugins come and end, and those that come are sent the pods that there are.
func TestNRIIsSwitchedByAReload(t *testing.T) {
	n := newNRINode(t, "")
	n.install("05", "logger")
	pid := n.PID()
	n.reload("enabled = false\n")
	if _, err := os.Stat(filepath.Join(n.dir, "nri.sock")); err == nil || n.isOn() {
		t.Errorf("NRI is on, or its socket is there: %v", err)
	}
	before := runPod(t, n.Node, "before")
	before.run("app", forever)

	n.reload("enabled = true\n")
	n.awaitPlugin("05-logger", true)
	if one := n.find("Synchronize", "", ""); !slices.Equal(one.Pods, []string{"before"}) || !slices.Equal(one.Containers, []string{"app CONTAINER_RUNNING"}) {
		t.Errorf("the plugin was synchronized with %+v", one)
	}
	during := runPod(t, n.Node, "during")
	during.run("app", forever)
	n.RemovePod(before.id)
	n.wantEvents("before", "", "StopPodSandbox", "RemovePodSandbox")
	n.wantEvents("before", "app", "StopContainer", "RemoveContainer")
	n.wantEvents("during", "", "RunPodSandbox")
	n.wantEvents("during", "app", "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer")

	// The socket of another runtime is not taken, and NRI stays as it is.
	other := filepath.Join(n.dir, "other.sock")
	listener, err := net.Listen("unix", other)
	check(t, err)
	n.reload("socket = '" + other + "'\n")
	if !strings.Contains(n.Log(), "NRI cannot be reloaded") || !slices.Contains(n.plugins(), "05-logger") {
		t.Errorf("the socket of another runtime was taken, or the plugin is gone: %v", n.plugins())
	}
	check(t, listener.Close())
	n.reload("socket = '" + other + "'\nrequest_timeout = '3s'\n")
	check(t, os.Rename(other, filepath.Join(n.dir, "nri.sock"))) // where connect looks
	n.connect("20", "adjuster")
	if got := n.plugins(); !slices.Equal(got, []string{"05-logger", "20-adjuster"}) {
		t.Errorf("plugins on the other socket: %v", got)
	}

	n.reload("enabled = false\n")
	heard := len(n.seen())
	runPod(t, n.Node, "after").run("app", forever)
	n.RemovePod(during.id)
	if got := len(n.seen()); got != heard || n.isOn() {
		t.Errorf("plugins that are gone were asked %d times", got-heard)
	}
	n.withoutPlugins("05-logger")
	expect(t, n.PID() == pid && !strings.Contains(n.Log(), "need a restart"), "the daemon was restarted, or wants to be")
}
