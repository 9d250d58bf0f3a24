package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func ids(pods []*runtimeapi.PodSandbox) string {
	var ids []string
	for _, pod := range pods {
		ids = append(ids, pod.GetId())
	}
	return strings.Join(ids, " ")
}

// A stream has the pods of a list, in its order, in pieces that are cut by size:
// pods with large annotations, which together no message of 16 MiB holds, are
// listed by both.
func TestStreamPodSandboxes(t *testing.T) {
	const most = 16 << 20 // what a kubelet accepts
	for _, test := range []struct{ count, annotation int }{{0, 0}, {1, 0}, {250, 0}, {100, 256 << 10}, {1, 2 * pieceBytes}} {
		var pods []stored
		note := strings.Repeat("x", test.annotation)
		for i := range test.count {
			config := podConfig(fmt.Sprint("pod", i), map[string]string{"odd": fmt.Sprint(i % 2)})
			config.Annotations = map[string]string{"note": note}
			pods = append(pods, stored{id: fmt.Sprintf("%04d", i), config: config})
		}
		client := dial(t, restored(t, pods...))
		for _, filter := range []*runtimeapi.PodSandboxFilter{nil, {LabelSelector: map[string]string{"odd": "1"}}} {
			list, err := client.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: filter}, grpc.MaxCallRecvMsgSize(math.MaxInt32))
			must(t, err)
			stream, err := client.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{Filter: filter}, grpc.MaxCallRecvMsgSize(most))
			must(t, err)
			var streamed []*runtimeapi.PodSandbox
			messages := 0
			for {
				message, err := stream.Recv()
				if errors.Is(err, io.EOF) {
					break
				}
				must(t, err)
				if n := len(message.GetPodSandboxes()); n == 0 || n > 1 && proto.Size(message) > 2*pieceBytes {
					t.Errorf("a message of %d pods and %d bytes", n, proto.Size(message))
				}
				streamed = append(streamed, message.GetPodSandboxes()...)
				messages++
			}
			whole := &runtimeapi.ListPodSandboxResponse{Items: streamed}
			longest := grpc.MaxCallRecvMsgSize(most)
			if fitting, err := client.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: filter}, longest); err != nil || len(fitting.GetItems()) != len(streamed) {
				t.Errorf("as a kubelet reads it the list has %d pods, %v", len(fitting.GetItems()), err)
			}
			for _, pod := range streamed {
				if len(pod.GetAnnotations()["note"]) != test.annotation {
					t.Fatalf("the stream has %d bytes of an annotation of %d", len(pod.GetAnnotations()["note"]), test.annotation)
				}
			}
			sent := proto.Size(whole)
			whole = fit(whole) // which leaves out of the stream's what the list has not
			same := slices.EqualFunc(whole.Items, list.GetItems(), func(a, b *runtimeapi.PodSandbox) bool { return proto.Equal(a, b) })
			if !same || messages > 1+sent/(pieceBytes/2) {
				t.Errorf("%d pods, filter %v: %d in %d messages, want %d", test.count, filter, len(streamed), messages, len(list.GetItems()))
			}
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
