package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// cri: PodSandbox.id
func TestTwoDaemonsSideBySide(t *testing.T) {
	nodes := harness.NewNodes(t, 2, harness.Parallel())
	a, b := nodes[0].RunPod(nodes[0].PodConfig("web")), nodes[1].RunPod(nodes[1].PodConfig("web"))
	for i, n := range nodes {
		if pods := list(t, n, nil); len(pods) != 1 || pods[0].Id != []string{a, b}[i] {
			t.Errorf("daemon %d lists %v", i, pods)
		}
	}
	// What is the other's is not swept when one starts.
	nodes[0].Kill()
	nodes[0].Start()
	if !ready(t, nodes[0], a) || !ready(t, nodes[1], b) {
		t.Error("a pod was lost when one daemon was started again")
	}
}

func TestSecondDaemonOnTheSameDirectoriesIsRefused(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	other := filepath.Join(n.Dir, "o") // short: sockets are below the state directory
	for name, flags := range map[string][]string{
		n.Root:   {"--state", other + "s", "--socket", other + ".sock"},
		n.State:  {"--root", other + "r", "--socket", other + ".sock"},
		n.Socket: {"--root", other + "r", "--state", other + "s", "--netns-dir", other + "-netns"},
	} {
		output, err := n.RunDaemon(flags...)
		if err == nil || !strings.Contains(output, name) {
			t.Errorf("%s: want an error that names it, got %v: %s", name, err, output)
		}
	}
	if info, err := os.Stat(n.Socket); err != nil || info.Mode() != os.ModeSocket|0o600 || !ready(t, n, id) {
		t.Errorf("the first daemon's pod is gone, or others can ask it: %v, %v", info, err)
	}
}

func TestSIGTERMLetsCallsFinish(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast+`shutdown = "50s"`))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	r.order("one", "ADD", "wait")
	answered := make(chan error, 1)
	go func() {
		_, err := n.Runtime.RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web")})
		answered <- err
	}()
	eventually(t, "ADD runs", patience, func() bool { return len(r.calls("ADD")) == 1 })
	ctx := limited(t)
	go func() {
		for !strings.Contains(n.Log(), "shutting down") && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		r.order("one", "ADD", "")
	}()
	n.Stop()
	check(t, <-answered)
	n.Start()
	if pods := list(t, n, nil); len(pods) != 1 || pods[0].State != runtimeapi.PodSandboxState_SANDBOX_READY {
		t.Errorf("listed: %v", pods)
	}
}
