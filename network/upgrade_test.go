package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/test/harness"
)

// The daemon before has spelled the directory of namespaces in another way (/run/netns is /var/run/netns). CHECK and
// DEL of its pods get the path of their ADD: the plugins compare it with the result of ADD.
func TestPodsOfAnotherSpellingOfTheDirectory(t *testing.T) {
	for _, network := range []struct {
		name   string
		chain  func(n *node) map[string]any
		called bool
	}{
		{"bridge", func(n *node) map[string]any { return n.chain(t)[0] }, false},
		{"scripted", (*node).script, true},
	} {
		t.Run(network.name, func(t *testing.T) {
			n := newNode(t, nil)
			n.configure(t, "10.conflist", "net", network.chain(n))
			n.attached(t, "web")
			before := n.Options.Namespaces.Path("web")
			link := filepath.Join(t.TempDir(), "var")
			must(t, os.Symlink(filepath.Dir(before), link))
			n.Options.Namespaces = namespace.Find(link, "net-")
			n.reopen(t)
			ids := []string{"web"}
			if network.called { // a second pod changes the address of a bridge, which CHECK finds
				n.attached(t, "new")
				ids = append(ids, "new")
			}
			for _, id := range ids {
				n.check(id)
				harness.Same(t, "drifted", n.Drifted(), []Drift{})
				n.detach(t, id)
			}
			for _, verb := range []string{"CHECK", "DEL"} {
				calls := strings.Join(n.calls(t, verb), "\n")
				same := strings.Contains(calls, " netns="+before+" ") &&
					strings.Contains(calls, " netns="+link+"/net-new ")
				harness.Want(t, !network.called || same, "calls of %s: %s", verb, calls)
			}
		})
	}
}
