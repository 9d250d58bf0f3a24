package server

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// Statistics and events that are too long for one message lose their longest texts, as
// lists do; what fits loses none.
func TestFit(t *testing.T) {
	much := map[string]string{"much": strings.Repeat("x", 1<<20)}
	pod := &runtimeapi.PodSandboxStats{Attributes: &runtimeapi.PodSandboxAttributes{Annotations: much}, Linux: &runtimeapi.LinuxPodSandboxStats{}}
	event := &runtimeapi.ContainerEventResponse{PodSandboxStatus: &runtimeapi.PodSandboxStatus{Annotations: much}}
	for range 40 {
		pod.Linux.Containers = append(pod.Linux.Containers, &runtimeapi.ContainerStats{Attributes: &runtimeapi.ContainerAttributes{Labels: much}})
		event.ContainersStatuses = append(event.ContainersStatuses, &runtimeapi.ContainerStatus{Annotations: much})
	}
	for _, message := range []proto.Message{fit(event), fit(&runtimeapi.ListPodSandboxStatsResponse{Stats: []*runtimeapi.PodSandboxStats{pod}})} {
		size := proto.Size(message)
		harness.Want(t, size <= mostAnswer, "%T of %d bytes", message, size)
	}
	small := &runtimeapi.ListPodSandboxResponse{Items: []*runtimeapi.PodSandbox{{Annotations: much}}}
	harness.Want(t, len(fit(small).Items[0].Annotations["much"]) == 1<<20, "a list that fits has lost a text")
}

// What the kubelet knows its pods by stays, however many short texts there are
// beside it: a pod without them is none of its own, and it would remove it.
func TestFitKeepsWhatTheKubeletNeeds(t *testing.T) {
	const namespace = "a-namespace-whose-name-is-as-long-as-the-other-texts"
	list := &runtimeapi.ListPodSandboxResponse{}
	for i := range 100 {
		labels := map[string]string{"io.kubernetes.pod.namespace": namespace, "io.kubernetes.pod.uid": fmt.Sprint(i)}
		for j := range 4000 {
			labels[fmt.Sprint("label-", j)] = strings.Repeat("x", 50)
		}
		annotations := map[string]string{"io.kubernetes.container.hash": strings.Repeat("x", 256<<10)} // not by the kubelet
		list.Items = append(list.Items, &runtimeapi.PodSandbox{Labels: labels, Annotations: annotations})
	}
	list = fit(list)
	harness.Want(t, proto.Size(list) <= mostAnswer, "%d bytes", proto.Size(list))
	for i, pod := range list.Items {
		harness.Want(t, pod.Labels["io.kubernetes.pod.namespace"] == namespace && pod.Labels["io.kubernetes.pod.uid"] == fmt.Sprint(i),
			"pod %d has lost what the kubelet knows it by", i)
	}
}
