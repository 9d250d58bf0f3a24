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
	_, err := runOwn(t, n, "early")
	wantCode(t, err, codes.Unavailable)
	if err == nil || !strings.Contains(err.Error(), conf) {
		t.Errorf("the error does not name the directory: %v", err)
	}
	wantHandlerProblem(t, n, conf)
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
	eventually(t, "the handler's network is there", 30*time.Second, func() bool { return handlerProblem(t, n) == "" })
	own, err := runOwn(t, n, "own")
	check(t, err)
	other := n.RunPod(n.PodConfig("other"))
	wantAddress(t, n, own, "10.89.")
	wantAddress(t, n, other, "10.88.")
	if found, clean := problems(t, n); !clean {
		t.Errorf("minicri check finds %v", found)
	}

	n.Kill()
	check(t, os.RemoveAll(conf))
	n.Start()
	wantHandlerProblem(t, n, conf)
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

func runOwn(t *testing.T, n *harness.Node, name string) (id string, err error) {
	t.Helper()
	answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig(name), RuntimeHandler: "own"})
	return answer.GetPodSandboxId(), err
}

func wantAddress(t *testing.T, n *harness.Node, id, prefix string) {
	t.Helper()
	answer, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	check(t, err)
	if got := answer.Status.Network.GetIp(); !strings.HasPrefix(got, prefix) {
		t.Errorf("the pod has the address %q, want %s...", got, prefix)
	}
}

// handlerProblem is what Status says of handlers that are not ready; the network
// of the node always is.
func handlerProblem(t *testing.T, n *harness.Node) (said string) {
	t.Helper()
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
	check(t, err)
	found := false
	for _, condition := range answer.Status.Conditions {
		switch condition.Type {
		case "RuntimeHandlerReady/own":
			found, said = true, condition.Message
		case runtimeapi.NetworkReady:
			if !condition.Status {
				t.Errorf("the node's network is not ready: %s", condition.Message)
			}
		}
	}
	if !found {
		t.Error("Status has no condition of the handler")
	}
	return said
}

func wantHandlerProblem(t *testing.T, n *harness.Node, conf string) {
	t.Helper()
	if said := handlerProblem(t, n); !strings.Contains(said, `"own"`) || !strings.Contains(said, conf) {
		t.Errorf("Status says %q of the handler", said)
	}
}
