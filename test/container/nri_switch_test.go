package container

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// reload puts other keys of [nri] into force, and waits until they are.
func (n *nriNode) reload(keys string) { reload(n.t, n.Node, "[nri]\n"+keys) }

// isOn reports whether Status shows plugins, be there none.
func (n *nriNode) isOn() bool { return harness.Info[any](n.t, n.Node, "nriPlugins") != nil }

// withoutPlugins switches NRI off and on, and leaves it without those that the daemon starts.
func (n *nriNode) withoutPlugins(names ...string) {
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
	_, err := os.Stat(filepath.Join(n.dir, "nri.sock"))
	expect(t, os.IsNotExist(err) && !n.isOn(), "NRI is on, or its socket is there: %v", err)
	before := runPod(t, n.Node, "before")
	before.run("app", forever)

	n.reload("enabled = true\n")
	n.awaitPlugin("05-logger", true)
	n.wantSynchronized("before")
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
	expect(t, strings.Contains(n.Log(), "NRI cannot be reloaded"), "the socket of another runtime was taken")
	same(t, "plugins", n.plugins(), []string{"05-logger"})
	check(t, listener.Close())
	n.reload("socket = '" + other + "'\nrequest_timeout = '3s'\n")
	check(t, os.Rename(other, filepath.Join(n.dir, "nri.sock"))) // where connect looks
	n.connect("20", "adjuster")
	same(t, "plugins on the other socket", n.plugins(), []string{"05-logger", "20-adjuster"})

	n.reload("enabled = false\n")
	heard := len(n.seen())
	runPod(t, n.Node, "after").run("app", forever)
	n.RemovePod(during.id)
	same(t, "requests that plugins have heard, and whether NRI is on", fmt.Sprint(len(n.seen()), n.isOn()), fmt.Sprint(heard, false))
	n.withoutPlugins("05-logger")
	expect(t, n.PID() == pid && !strings.Contains(n.Log(), "need a restart"), "the daemon was restarted, or wants to be")
}
