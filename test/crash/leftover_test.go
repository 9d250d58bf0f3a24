package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// A plugin that hangs ends with the daemon that started it, and all that it has
// started does. The next daemon serves at once, and what the plugins had made is undone.
func TestProperty3_HangingPluginOfADaemonThatWasKilled(t *testing.T) {
	n := newNode(t, harness.Config(`cni_add = "1m"`))
	w := n.runWitness(t)
	before := n.Look()
	c := trial{node: n, witness: w, point: "middle ADD", row: row{operation: run}, config: n.PodConfig("case")}
	done := c.begin(limited(t), t, "hang")
	n.disarm(t)
	n.Kill()
	<-done
	eventually(t, "the plugin has ended", func() bool { return !n.tripRuns(t) })
	n.Start()
	c.checkWitness(t)
	n.RemovePod(n.RunPod(n.PodConfig("other")))
	n.wantSame(t, before)
}

func (n *node) tripRuns(t *testing.T) bool {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	check(t, err)
	for _, file := range files {
		environment, _ := os.ReadFile(file) // the process may have ended
		if text := string(environment); strings.Contains(text, "CNI_PATH="+n.State) && strings.Contains(text, "CNI_COMMAND=ADD") {
			return true
		}
	}
	return false
}
