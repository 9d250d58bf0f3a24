package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "minicri-recorder")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	recorderPath = filepath.Join(dir, "recorder")
	code := harness.Main(m)
	os.RemoveAll(dir)
	os.Exit(code)
}

// fast are limits with which a test need not wait long.
const fast = `[limits]
reload = "20ms"
status_period = "500ms"
retry_first = "50ms"
retry_most = "200ms"
`

// newNode makes a node for a test that runs beside others.
func newNode(t *testing.T, opts ...harness.Option) *harness.Node {
	t.Helper()
	return harness.NewNode(t, append(opts, harness.Parallel())...)
}

func check(t testing.TB, err error) {
	t.Helper()
	harness.Check(t, err)
}

// wantCode fails the test unless the error has the gRPC code.
func wantCode(t testing.TB, err error, code codes.Code) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("want code %v, got: %v", code, err)
	}
}

// patience is the longest that a test waits for what has no limit of its own.
const patience = 3 * time.Minute

// limited gives a context that ends with the test's patience.
func limited(t testing.TB) context.Context {
	t.Helper()
	return harness.Limited(t, patience)
}

// eventually polls until the condition holds, and fails the test if that takes
// longer than the limit.
func eventually(t testing.TB, what string, limit time.Duration, holds func() bool) {
	t.Helper()
	harness.Eventually(t, what, limit, holds)
}

// run calls RunPodSandbox.
func run(t testing.TB, n *harness.Node, config *runtimeapi.PodSandboxConfig) (string, error) {
	t.Helper()
	answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: config})
	return answer.GetPodSandboxId(), err
}

func stop(t testing.TB, n *harness.Node, id string) error {
	t.Helper()
	_, err := n.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

func remove(t testing.TB, n *harness.Node, id string) error {
	t.Helper()
	_, err := n.Runtime.RemovePodSandbox(limited(t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

func list(t testing.TB, n *harness.Node, filter *runtimeapi.PodSandboxFilter) []*runtimeapi.PodSandbox {
	t.Helper()
	answer, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{Filter: filter})
	check(t, err)
	return answer.Items
}

func podStatus(t testing.TB, n *harness.Node, id string) *runtimeapi.PodSandboxStatus {
	t.Helper()
	answer, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	check(t, err)
	return answer.Status
}

func ready(t testing.TB, n *harness.Node, id string) bool {
	t.Helper()
	return podStatus(t, n, id).State == runtimeapi.PodSandboxState_SANDBOX_READY
}

// podInfo is what the verbose status of a pod shows, as far as tests use it.
type podInfo struct {
	PID                int             `json:"pid"`
	NetNamespace       string          `json:"netNamespace"`
	NetNamespaceClosed bool            `json:"netNamespaceClosed"`
	CgroupsPath        string          `json:"cgroupsPath"`
	Config             json.RawMessage `json:"config"`
	CNIResult          json.RawMessage `json:"cniResult"`
	RuntimeSpec        struct {
		OCIVersion string `json:"ociVersion"`
	} `json:"runtimeSpec"`
	Timeline []struct {
		Step string `json:"step"`
	} `json:"timeline"`
}

func verbose(t testing.TB, n *harness.Node, id string) podInfo {
	t.Helper()
	answer, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	check(t, err)
	var info podInfo
	check(t, json.Unmarshal([]byte(answer.Info["info"]), &info))
	info.CgroupsPath = cgroup.Path(info.CgroupsPath)
	return info
}

func networkReady(t testing.TB, n *harness.Node) (ready bool, message string) {
	t.Helper()
	return condition(t, n, runtimeapi.NetworkReady)
}

func condition(t testing.TB, n *harness.Node, kind string) (holds bool, message string) {
	t.Helper()
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
	check(t, err)
	for _, condition := range answer.Status.Conditions {
		if condition.Type == kind {
			return condition.Status, condition.Message
		}
	}
	t.Fatal("Status has no condition " + kind)
	return false, ""
}
