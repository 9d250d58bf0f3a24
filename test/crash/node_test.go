package crash

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// atOnce is how many nodes are at work, unless -parallel says so: most of the time a case waits.
const atOnce = "4"

// TestMain chooses the binaries with failpoints.
func TestMain(m *testing.M) {
	binaries, err := filepath.Abs("../../bin/failpoints")
	if err == nil && os.Getenv("MINICRI_BIN") == "" {
		err = os.Setenv("MINICRI_BIN", binaries)
	}
	if err == nil {
		_, err = os.Stat(filepath.Join(os.Getenv("MINICRI_BIN"), "trip"))
	}
	if err == nil {
		err = flag.Set("test.parallel", atOnce)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "crash: it needs binaries with failpoints, see 'make failpoints':", err)
		os.Exit(1)
	}
	os.Exit(harness.Main(m))
}

const patience = 2 * time.Minute

// node is a node with failpoints and with plugins of the test in its chain.
type node struct {
	*harness.Node
	harness.Failpoints
	calls   string                       // what trip wrote down
	witness *runtimeapi.PodSandboxStatus // of the pod that has to stay Ready, or nil
}

const limits = `[limits]
reload = "50ms"
retry_first = "20ms"
retry_most = "100ms"
`

func newNode(t *testing.T, opts ...harness.Option) *node {
	dir := t.TempDir()
	n := &node{Failpoints: harness.Failpoints(filepath.Join(dir, "points")), calls: filepath.Join(dir, "calls")}
	n.Node = harness.NewNode(t, append([]harness.Option{
		harness.Parallel(), harness.NoNetwork(), harness.Config(limits), n.Failpoints.Option(),
	}, opts...)...)
	harness.Check(t, os.Symlink(filepath.Join(os.Getenv("MINICRI_BIN"), "trip"), filepath.Join(n.Plugins, "trip")))
	n.writeChain()
	return n
}

const addresses = 3

// writeChain configures a chain with a trip before, between and behind bridge and portmap.
func (n *node) writeChain() {
	bridge := n.BridgePlugin()
	bridge["ipam"].(harness.Object)["ranges"] = [][]harness.Object{{{
		"subnet": "10.88.0.0/16", "rangeStart": "10.88.0.2", "rangeEnd": fmt.Sprintf("10.88.0.%d", 1+addresses),
	}}}
	portmap := harness.Object{"type": "portmap", "capabilities": harness.Object{"portMappings": true}, "snat": true}
	n.WriteConflist("10-chain.conflist", n.trip("first"), bridge, n.trip("middle"), portmap, n.trip("last"))
}

func (n *node) trip(as string) harness.Object {
	return harness.Object{"type": "trip", "as": as, "record": n.calls}
}

func (n *node) waitEnd(t testing.TB) {
	eventually(t, "the daemon ends", func() bool { return !n.Running() })
}

func (n *node) run(ctx context.Context, config *runtimeapi.PodSandboxConfig) (string, error) {
	answer, err := n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	return answer.GetPodSandboxId(), err
}

func (n *node) stop(ctx context.Context, id string) error {
	_, err := n.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

func (n *node) remove(ctx context.Context, id string) error {
	_, err := n.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

func (n *node) list(t testing.TB) []*runtimeapi.PodSandbox {
	return harness.Call(t, n.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{}).GetItems()
}

func (n *node) status(t testing.TB, id string) *runtimeapi.PodSandboxStatus {
	return harness.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}).GetStatus()
}

func (n *node) pausePID(t testing.TB, id string) int {
	answer := harness.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	var info struct{ PID int }
	harness.Check(t, json.Unmarshal([]byte(answer.GetInfo()["info"]), &info))
	return info.PID
}

func limited(t testing.TB) context.Context { return harness.Limited(t, patience) }

func eventually(t testing.TB, what string, holds func() bool) {
	harness.Eventually(t, what, patience, holds)
}

// same fails the test unless two values are the same.
func same[T any](t testing.TB, what string, got, want T) { harness.Same(t, what, got, want) }
