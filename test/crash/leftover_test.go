package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

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

// A daemon starts beside 60 plugins that hang, of its predecessor, as fast as
// without; requests for other pods are served, and each plugin is ended
// at its own limit.
func TestStartBesideManyPluginsThatHang(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-crash runs it; make test runs one of package network")
	}
	const many, bound = 60, 5 * time.Second
	n := newNode(t, harness.Config(`run = "2m"
cni_add = "1m"`))
	w := n.runWitness(t)
	before := n.Look()
	n.Kill()
	began := time.Now()
	n.Start()
	alone := time.Since(began)
	n.arm(t, "first ADD hang")
	var calls sync.WaitGroup
	for i := range many {
		calls.Go(func() { _, _ = n.run(harness.Limited(t, 2*time.Minute), n.PodConfig(fmt.Sprint("hangs-", i))) }) // the daemon is killed
	}
	harness.Eventually(t, "all plugins hang", 2*time.Minute, func() bool { return len(n.running(t, "trip")) == many })
	n.Kill()
	calls.Wait()
	began = time.Now()
	n.Start()
	beside := time.Since(began)
	fmt.Printf("start beside %d plugins that hang: %v, alone %v\n", many, beside.Round(time.Millisecond), alone.Round(time.Millisecond))
	if beside > alone+bound {
		t.Errorf("the start took %v, alone %v", beside, alone)
	}
	(&trial{node: n, witness: w}).checkWitness(t)
	n.RemovePod(n.RunPod(n.PodConfig("host", harness.HostNetwork())))
	n.disarm(t) // they end, and are undone
	n.wantSame(t, before)
}

// running are the node's processes of a program.
func (n *node) running(t *testing.T, program string) (pids []int) {
	t.Helper()
	for _, pid := range n.processes(t) {
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && filepath.Base(exe) == program {
			pids = append(pids, pid)
		}
	}
	return pids
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
