package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// A plugin that hangs outlives the daemon that started it. The next daemon
// serves at once and gives the plugin the time of its verb; nothing else waits
// for it (P3, P14).
func TestProperty3_HangingPluginOfADaemonThatWasKilled(t *testing.T) {
	const limit = 2 * time.Second
	n := newNode(t, harness.Config(`cni_add = "2s"`))
	w := n.runWitness(t)
	before := n.Look()
	c := trial{node: n, witness: w, point: "middle ADD", row: row{operation: run}, config: n.PodConfig("case")}
	done := c.begin(limited(t), t, "hang")
	n.Kill()
	<-done
	began := time.Now()
	n.Start()
	c.checkWitness(t)
	if took := time.Since(began); took > limit/2 {
		t.Errorf("serving after %v", took)
	}
	n.RemovePod(n.RunPod(n.PodConfig("host", harness.HostNetwork())))
	if took := time.Since(began); took < limit && !n.tripRuns(t) {
		t.Errorf("the plugin was ended after %v, before its time", took)
	}
	eventually(t, "the plugin is ended", func() bool { return !n.tripRuns(t) })
	if took := time.Since(began); took < limit || took > 2*limit {
		t.Errorf("the plugin was ended after %v, its limit is %v", took, limit)
	}
	n.disarm(t)
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
