package e2e

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// However much the pods carry, the list of all arrives, in one message as the
// kubelet reads it; what would make it too long is refused with the fields' names.
// What is removed makes room again.
func TestNoPodBreaksTheList(t *testing.T) {
	n := newNode(t)
	ctx := harness.Limited(t, patience)
	heavy := func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations = map[string]string{"much": strings.Repeat("x", 256<<10-4)}
		c.Labels = map[string]string{"much": strings.Repeat("y", 256<<10-4)}
	}
	var ids []string
	var refused error
	for i := range 40 {
		answer, err := n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig(fmt.Sprint("heavy-", i), harness.HostNetwork(), heavy)})
		if err != nil {
			refused = err
			break
		}
		ids = append(ids, answer.PodSandboxId)
	}
	if status.Code(refused) != codes.ResourceExhausted || !strings.Contains(refused.Error(), "config.annotations") || !strings.Contains(refused.Error(), "bytes") {
		t.Errorf("after %d pods of 512 KiB each: %v", len(ids), refused)
	}
	if got := len(list(t, n, nil)); got != len(ids) || got < 10 {
		t.Errorf("%d pods are listed, want %d", got, len(ids))
	}
	stats, err := n.Runtime.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
	if err != nil || len(stats.Stats) != len(ids) {
		t.Errorf("statistics of %d pods, %v", len(stats.GetStats()), err)
	}
	n.Restart() // what is there counts after a restart too
	if _, err := n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("one-more", harness.HostNetwork(), heavy)}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more: %v", err)
	}
	n.RunPod(n.PodConfig("light", harness.HostNetwork()))
	n.RemovePod(ids[0])
	n.RunPod(n.PodConfig("one-more", harness.HostNetwork(), heavy))
}
