package server

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A stream has all of a list in its order, in pieces that are cut by size; what is larger
// than a piece is sent alone.
func TestSendPieces(t *testing.T) {
	for _, test := range []struct{ count, annotation, messages int }{{0, 0, 0}, {1, 0, 1}, {250, 0, 1}, {100, 256 << 10, 34}, {3, 2 * pieceBytes, 3}} {
		var list, sent []*runtimeapi.PodSandbox
		for i := range test.count {
			list = append(list, &runtimeapi.PodSandbox{Id: fmt.Sprint(i), Annotations: map[string]string{"note": strings.Repeat("x", test.annotation)}})
		}
		messages := 0
		must(t, sendPieces(list, func(piece []*runtimeapi.PodSandbox) error {
			messages++
			sent = append(sent, piece...)
			return nil
		}))
		if !slices.Equal(sent, list) || messages != test.messages {
			t.Errorf("%d pods with %d bytes: %d in %d messages", test.count, test.annotation, len(sent), messages)
		}
	}
}

// What is unknown is not found, is stopped and is removed; what is malformed
// is told so.
//
// cri: CheckpointPod
func TestUnknownAndMalformed(t *testing.T) {
	client := dial(t, restored(t))
	for _, id := range []string{"unknown", "../unknown", "a\x00b"} {
		_, err := client.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
		wantCode(t, err, codes.NotFound)
		_, err = client.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
		wantCode(t, err, codes.OK)
		_, err = client.RemovePodSandbox(t.Context(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		wantCode(t, err, codes.OK)
	}
	_, err := client.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{})
	wantCode(t, err, codes.InvalidArgument)
	_, err = client.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{})
	wantCode(t, err, codes.InvalidArgument)
	_, err = client.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("a", nil), RuntimeHandler: "kata"})
	wantCode(t, err, codes.InvalidArgument)
	_, err = client.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{})
	wantCode(t, err, codes.InvalidArgument)
	_, err = client.CheckpointPod(t.Context(), &runtimeapi.CheckpointPodRequest{})
	wantCode(t, err, codes.Unimplemented)
}

func wantCode(t *testing.T, err error, code codes.Code) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("got %v, want %v", err, code)
	}
}

// The resources of a pod are recorded and shown, those of the last update or
// those that it was made with, for a pod that has ended too. What an update does not
// give stays.
//
// cri: LinuxPodSandboxConfig.overhead LinuxPodSandboxConfig.resources UpdatePodSandboxResources
// cri: UpdatePodSandboxResourcesRequest.overhead
// cri: UpdatePodSandboxResourcesRequest.pod_sandbox_id UpdatePodSandboxResourcesRequest.resources
func TestUpdatePodSandboxResources(t *testing.T) {
	config := podConfig("web", nil)
	config.Linux.Overhead, config.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuShares: 7}, &runtimeapi.LinuxContainerResources{CpuShares: 66}
	client := dial(t, restored(t,
		stored{id: "aa11", config: config, ready: true},
		stored{id: "bb22", config: podConfig("ended", nil)},
	))
	shown := func(id string) (resources struct {
		Info struct {
			Overhead, Resources struct {
				CPUShares, MemoryLimitInBytes string
			}
		}
	},
	) {
		response, err := client.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
		must(t, err)
		must(t, json.Unmarshal([]byte(response.GetInfo()["info"]), &resources.Info))
		return resources
	}
	if got := shown("aa11").Info; got.Overhead.CPUShares != "7" || got.Resources.CPUShares != "66" {
		t.Errorf("before an update: %+v", got)
	}
	for _, id := range []string{"aa11", "bb22"} {
		_, err := client.UpdatePodSandboxResources(t.Context(), &runtimeapi.UpdatePodSandboxResourcesRequest{
			PodSandboxId: id, Resources: &runtimeapi.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 1 << 30},
		})
		if err != nil {
			t.Errorf("update of %s: %v", id, err)
		}
	}
	for id, overhead := range map[string]string{"aa11": "7", "bb22": ""} {
		if got := shown(id).Info; got.Overhead.CPUShares != overhead || got.Resources.CPUShares != "512" || got.Resources.MemoryLimitInBytes != "1073741824" {
			t.Errorf("after an update of %s: %+v", id, got)
		}
	}
	shares := func(count int64) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{CpuShares: count}
	}
	_, err := client.UpdatePodSandboxResources(t.Context(), &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "aa11", Overhead: shares(9)})
	if got := shown("aa11").Info; err != nil || got.Overhead.CPUShares != "9" || got.Resources.CPUShares != "512" {
		t.Errorf("after an update of the overhead: %+v, %v", got, err)
	}
	for name, refused := range map[string]struct {
		request *runtimeapi.UpdatePodSandboxResourcesRequest
		code    codes.Code
	}{
		"no pod":             {&runtimeapi.UpdatePodSandboxResourcesRequest{}, codes.InvalidArgument},
		"unknown pod":        {&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "gone", Resources: shares(512)}, codes.NotFound},
		"negative shares":    {&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "aa11", Resources: shares(-5)}, codes.InvalidArgument},
		"shares of overhead": {&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "aa11", Overhead: shares(-5)}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := client.UpdatePodSandboxResources(t.Context(), refused.request)
			wantCode(t, err, refused.code)
		})
	}
}

// cri: PodSandboxStatusResponse.containers_statuses PodSandboxStatusResponse.timestamp
func TestStatusHasTheContainersWithTheTime(t *testing.T) {
	client := dial(t, restored(t, stored{id: "aa11", config: podConfig("web", nil), ready: true}))
	before := time.Now().UnixNano()
	response, err := client.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: "aa11"})
	must(t, err)
	if at := response.GetTimestamp(); at < before || at > time.Now().UnixNano() || len(response.GetContainersStatuses()) != 0 {
		t.Errorf("the status is of %d (asked at %d), with the containers %v", at, before, response.GetContainersStatuses())
	}
}
