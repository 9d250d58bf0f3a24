package server

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
)

// cri: ContainerStats ContainerStatsRequest.container_id CpuUsage.timestamp LinuxPodSandboxStats.cpu
// cri: LinuxPodSandboxStats.process ListPodSandboxStats ListPodSandboxStatsRequest.filter
// cri: ListPodSandboxStatsResponse.stats PodSandboxAttributes.metadata PodSandboxStats
// cri: PodSandboxStats.attributes PodSandboxStats.linux PodSandboxStatsFilter.label_selector
// cri: PodSandboxStatsRequest.pod_sandbox_id ProcessUsage.process_count StreamPodSandboxStats
// cri: StreamPodSandboxStatsResponse.pod_sandbox_stats
func TestPodStats(t *testing.T) {
	runtime := restored(t,
		stored{id: "aa11", config: podConfig("web", map[string]string{"app": "web"}), ready: true},
		stored{id: "bb22", config: podConfig("gone", map[string]string{"app": "web"})},
	)
	client := dial(t, runtime)
	sb, err := runtime.Sandboxes.Find("aa11")
	must(t, err)
	intoCgroup(t, sb.Facts().Pause.PID, sb.CgroupsPath)
	list, err := client.ListPodSandboxStats(t.Context(), &runtimeapi.ListPodSandboxStatsRequest{
		Filter: &runtimeapi.PodSandboxStatsFilter{LabelSelector: map[string]string{"app": "web"}},
	})
	if err != nil || len(list.GetStats()) != 1 {
		t.Fatalf("the stats are %v (%v), not those of the one pod that runs", list.GetStats(), err)
	}
	pod := list.GetStats()[0]
	if pod.GetAttributes().GetMetadata().GetName() != "web" || pod.GetLinux().GetProcess().GetProcessCount().GetValue() != 1 || pod.GetLinux().GetCpu().GetTimestamp() <= 0 {
		t.Errorf("the stats of a pod with one process are %v", pod)
	}
	stream, err := client.StreamPodSandboxStats(t.Context(), &runtimeapi.StreamPodSandboxStatsRequest{})
	must(t, err)
	if piece, err := stream.Recv(); err != nil || len(piece.GetPodSandboxStats()) != 1 {
		t.Errorf("the stream has %v (%v)", piece, err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ends with %v", err)
	}
	if _, err := client.PodSandboxStats(t.Context(), &runtimeapi.PodSandboxStatsRequest{PodSandboxId: "cc"}); status.Code(err) != codes.NotFound {
		t.Errorf("the stats of no pod are the error %v", err)
	}
	if _, err := client.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: "cc"}); status.Code(err) != codes.NotFound {
		t.Errorf("the stats of no container are the error %v", err)
	}
}

// intoCgroup makes the cgroup and puts the process into it, in all hierarchies.
// It is ended when the sandboxes of the test no longer hold the process.
func intoCgroup(t *testing.T, pid int, path string) {
	t.Helper()
	hierarchies, err := cgroup.FindHierarchies()
	must(t, err)
	t.Cleanup(func() {
		if err := hierarchies.Remove(path, time.Minute); err != nil {
			t.Error(err)
		}
	})
	for _, hierarchy := range hierarchies {
		directory := filepath.Join(hierarchy, path)
		must(t, os.Mkdir(directory, 0o755))
		if filepath.Base(hierarchy) == "cpuset" {
			continue // a new one on version 1 has no processors
		}
		must(t, os.WriteFile(filepath.Join(directory, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0))
	}
}
