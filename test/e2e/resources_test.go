package e2e

import (
	"encoding/json"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The resources of a pod are recorded and shown, those of the last update or those that
// it was made with, for a pod that has ended too. What an update does not give stays.
//
// cri: LinuxPodSandboxConfig.overhead LinuxPodSandboxConfig.resources UpdatePodSandboxResources
// cri: UpdatePodSandboxResourcesRequest.overhead
// cri: UpdatePodSandboxResourcesRequest.pod_sandbox_id UpdatePodSandboxResourcesRequest.resources
func TestUpdatePodSandboxResources(t *testing.T) {
	n := newNode(t)
	shares := func(count int64) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{CpuShares: count}
	}
	id, ended := n.RunPod(n.PodConfig("web", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Overhead, c.Linux.Resources = shares(7), shares(66)
	})), n.RunPod(n.PodConfig("ended"))
	check(t, stop(t, n, ended))
	shown := func(id, overhead, resources, memory string) {
		t.Helper()
		response, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
		check(t, err)
		var got struct {
			Overhead, Resources struct{ CPUShares, MemoryLimitInBytes string }
		}
		check(t, json.Unmarshal([]byte(response.GetInfo()["info"]), &got))
		if got.Overhead.CPUShares != overhead || got.Resources.CPUShares != resources || got.Resources.MemoryLimitInBytes != memory {
			t.Errorf("shown are %+v, want %q, %q, %q", got, overhead, resources, memory)
		}
	}
	update := func(id string, resources, overhead *runtimeapi.LinuxContainerResources, code codes.Code) {
		t.Helper()
		_, err := n.Runtime.UpdatePodSandboxResources(limited(t), &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: id, Resources: resources, Overhead: overhead})
		wantCode(t, err, code)
	}
	shown(id, "7", "66", "")
	for one, overhead := range map[string]string{id: "7", ended: ""} {
		update(one, &runtimeapi.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 1 << 30}, nil, codes.OK)
		shown(one, overhead, "512", "1073741824")
	}
	update(id, nil, shares(9), codes.OK)
	shown(id, "9", "512", "1073741824")
	update("", nil, nil, codes.InvalidArgument)
	update("gone", shares(512), nil, codes.NotFound)
	update(id, shares(-5), nil, codes.InvalidArgument)
	update(id, nil, shares(-5), codes.InvalidArgument)
}

// cri: PodSandboxStatusResponse.containers_statuses PodSandboxStatusResponse.timestamp
func TestStatusHasTheContainersWithTheTime(t *testing.T) {
	n := newNode(t)
	id, before := n.RunPod(n.PodConfig("web")), time.Now().UnixNano()
	response, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	check(t, err)
	if at := response.GetTimestamp(); at < before || at > time.Now().UnixNano() || len(response.GetContainersStatuses()) != 0 {
		t.Errorf("the status is of %d (asked at %d), with the containers %v", at, before, response.GetContainersStatuses())
	}
}
