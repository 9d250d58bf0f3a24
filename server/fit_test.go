package server

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// What is too long for one message loses its longest texts, and no other; the
// configurations that the texts are of stay as they are.
func TestFit(t *testing.T) {
	long := strings.Repeat("x", 256<<10-10)
	configs := make([]map[string]string, 1000)
	list := &runtimeapi.ListPodSandboxResponse{}
	for i := range configs {
		configs[i] = map[string]string{"long": long, "short": fmt.Sprint(i)}
		list.Items = append(list.Items, &runtimeapi.PodSandbox{Id: fmt.Sprint(i), Labels: map[string]string{"app": "web"}, Annotations: configs[i]})
	}
	list = fit(list)
	if size := proto.Size(list); size > mostAnswer || len(list.Items) != len(configs) {
		t.Errorf("%d pods in %d bytes", len(list.Items), size)
	}
	for i, pod := range list.Items {
		if pod.Annotations["short"] != fmt.Sprint(i) || pod.Labels["app"] != "web" || len(configs[i]["long"]) != len(long) {
			t.Fatalf("pod %d: labels %v, annotations of %d bytes", i, pod.Labels, len(fmt.Sprint(pod.Annotations)))
		}
	}
	much := map[string]string{"much": strings.Repeat("x", 1<<20)} // statistics and events carry the same
	pod := &runtimeapi.PodSandboxStats{Attributes: &runtimeapi.PodSandboxAttributes{Annotations: much}, Linux: &runtimeapi.LinuxPodSandboxStats{}}
	event := &runtimeapi.ContainerEventResponse{PodSandboxStatus: &runtimeapi.PodSandboxStatus{Annotations: much}}
	for range 40 {
		pod.Linux.Containers = append(pod.Linux.Containers, &runtimeapi.ContainerStats{Attributes: &runtimeapi.ContainerAttributes{Labels: much}})
		event.ContainersStatuses = append(event.ContainersStatuses, &runtimeapi.ContainerStatus{Annotations: much})
	}
	for _, message := range []proto.Message{fit(event), fit(&runtimeapi.ListPodSandboxStatsResponse{Stats: []*runtimeapi.PodSandboxStats{pod}})} {
		if size := proto.Size(message); size > mostAnswer {
			t.Errorf("%T of %d bytes", message, size)
		}
	}
	small := &runtimeapi.ListPodSandboxResponse{Items: []*runtimeapi.PodSandbox{{Annotations: configs[0]}}}
	if fit(small).Items[0].Annotations["long"] != long {
		t.Error("a list that fits has lost a text")
	}
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
	if list = fit(list); proto.Size(list) > mostAnswer {
		t.Errorf("%d bytes", proto.Size(list))
	}
	for i, pod := range list.Items {
		if pod.Labels["io.kubernetes.pod.namespace"] != namespace || pod.Labels["io.kubernetes.pod.uid"] != fmt.Sprint(i) {
			t.Fatalf("pod %d has lost what the kubelet knows it by", i)
		}
	}
}
