package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A handler with a directory of network configurations gives its pods the network
// of that one: without a network there its pods fail, alone and by name; it comes
// and goes without a restart; and DEL takes what ADD was given.
func TestHandlerWithItsOwnNetwork(t *testing.T) {
	dir := t.TempDir()
	conf, addresses := filepath.Join(dir, "own.d"), filepath.Join(dir, "addresses")
	n := newNode(t, harness.Config(fmt.Sprintf("[runtimes.own]\ntype = 'builtin'\ncni_conf_dir = %q", conf)))
	runOwn := func(name string) (string, error) {
		answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig(name), RuntimeHandler: "own"})
		return answer.GetPodSandboxId(), err
	}
	wantProblem := func() {
		t.Helper()
		if holds, said := condition(t, n, "RuntimeHandlerReady/own"); holds || !strings.Contains(said, `"own"`) || !strings.Contains(said, conf) {
			t.Errorf("Status says %q of the handler", said)
		}
		if isReady, said := networkReady(t, n); !isReady {
			t.Errorf("the node's network is not ready: %s", said)
		}
	}
	_, err := runOwn("early")
	wantCode(t, err, codes.Unavailable)
	if err == nil || !strings.Contains(err.Error(), conf) {
		t.Errorf("the error does not name the directory: %v", err)
	}
	wantProblem()
	// The condition that the daemon says, and what the check sees itself.
	found, _ := problems(t, n)
	if len(found) == 0 {
		t.Error("minicri check finds nothing")
	}
	for _, problem := range found {
		if !strings.Contains(problem.Message, conf) {
			t.Errorf("minicri check finds %v", problem)
		}
	}

	check(t, os.Mkdir(conf, 0o755))
	check(t, os.WriteFile(filepath.Join(conf, "10-own.conflist"), ownNetwork(t, n, addresses), 0o644))
	eventually(t, "the handler's network is there", 30*time.Second, func() bool { holds, _ := condition(t, n, "RuntimeHandlerReady/own"); return holds })
	own, err := runOwn("own")
	check(t, err)
	other := n.RunPod(n.PodConfig("other"))
	for id, prefix := range map[string]string{own: "10.89.", other: "10.88."} {
		if got := podStatus(t, n, id).Network.GetIp(); !strings.HasPrefix(got, prefix) {
			t.Errorf("the pod has the address %q, want %s...", got, prefix)
		}
	}
	if found, clean := problems(t, n); !clean {
		t.Errorf("minicri check finds %v", found)
	}

	n.Kill()
	check(t, os.RemoveAll(conf))
	n.Start()
	wantProblem()
	n.RemovePod(own)
	left, err := filepath.Glob(filepath.Join(addresses, "own", "10.89.*"))
	check(t, err)
	if len(left) > 0 {
		t.Errorf("DEL has left %v", left)
	}
	n.RemovePod(other)
}

// ownNetwork is a network of the name "own", on the node's bridge with addresses
// of its own.
func ownNetwork(t *testing.T, n *harness.Node, addresses string) []byte {
	t.Helper()
	data, err := json.Marshal(harness.Object{"cniVersion": "1.0.0", "name": "own", "plugins": []harness.Object{{
		"type": "bridge", "bridge": n.Bridge,
		"ipam": harness.Object{"type": "host-local", "dataDir": addresses, "ranges": [][]harness.Object{{{"subnet": "10.89.0.0/16"}}}},
	}}})
	check(t, err)
	return data
}
