package crash

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// patience is the longest that a test waits for what has no limit of its own.
const patience = 2 * time.Minute

// node is a node with failpoints and with plugins of the test in its chain.
type node struct {
	*harness.Node
	points string // the file of failpoints
	calls  string // what trip wrote down
}

// limits are short where a test would wait for them.
const limits = `[limits]
reload = "50ms"
retry_first = "20ms"
retry_most = "100ms"
`

// newNode makes a node that runs beside those of other tests.
func newNode(t *testing.T, opts ...harness.Option) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{points: filepath.Join(dir, "points"), calls: filepath.Join(dir, "calls")}
	n.Node = harness.NewNode(t, append([]harness.Option{
		harness.Parallel(), harness.NoNetwork(), harness.Config(limits), harness.Env("MINICRI_FAILPOINTS=" + n.points),
	}, opts...)...)
	check(t, os.Symlink(filepath.Join(os.Getenv("MINICRI_BIN"), "trip"), filepath.Join(n.Plugins, "trip")))
	n.writeChain()
	return n
}

// addresses is how many the network has.
const addresses = 3

// writeChain configures a chain with a trip before, between and behind bridge
// and portmap.
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

// arm says what is to happen at which points: "POINT ACTION" each.
func (n *node) arm(t testing.TB, orders ...string) {
	t.Helper()
	check(t, removeIfThere(n.hitFile()))
	var lines strings.Builder
	for _, order := range orders {
		space := strings.LastIndexByte(order, ' ')
		fmt.Fprintf(&lines, "%s\t%s\n", order[:space], order[space+1:])
	}
	check(t, os.WriteFile(n.points+".new", []byte(lines.String()), 0o600))
	check(t, os.Rename(n.points+".new", n.points))
}

func (n *node) disarm(t testing.TB) {
	t.Helper()
	check(t, removeIfThere(n.points))
}

func (n *node) hitFile() string { return n.points + ".hit" }

func (n *node) wasHit() bool {
	_, err := os.Stat(n.hitFile())
	return err == nil
}

// waitEnd waits until the daemon has ended by itself.
func (n *node) waitEnd(t testing.TB) {
	t.Helper()
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
	t.Helper()
	answer, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
	check(t, err)
	return answer.GetItems()
}

func (n *node) status(t testing.TB, id string) *runtimeapi.PodSandboxStatus {
	t.Helper()
	answer, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	check(t, err)
	return answer.GetStatus()
}

// pausePID is the process of a sandbox as the daemon has it.
func (n *node) pausePID(t testing.TB, id string) int {
	t.Helper()
	answer, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	check(t, err)
	var info struct{ PID int }
	check(t, json.Unmarshal([]byte(answer.GetInfo()["info"]), &info))
	return info.PID
}

// limited gives a context that ends with the test's patience.
func limited(t testing.TB) context.Context {
	t.Helper()
	return harness.Limited(t, patience)
}

// eventually polls until the condition holds.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	harness.Eventually(t, what, patience, holds)
}

func check(t testing.TB, err error) {
	t.Helper()
	harness.Check(t, err)
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}
