package kubelet

import (
	"encoding/json"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels by which a kubelet finds its own.
const (
	podLabel       = "io.kubernetes.pod.name"
	containerLabel = "io.kubernetes.container.name"
)

func labels(pod string) map[string]string { return map[string]string{podLabel: pod + "-" + nodeName} }

// inRuntime is what the runtime knows of a pod's container.
func (k *kubelet) inRuntime(pod, name string) *runtimeapi.ContainerStatus {
	k.t.Helper()
	selector := labels(pod)
	selector[containerLabel] = name
	list, err := k.Runtime.ListContainers(limited(k.t), &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{LabelSelector: selector}})
	check(k.t, err)
	if len(list.Containers) != 1 {
		k.t.Fatalf("the runtime has %d containers %s of pod %s", len(list.Containers), name, pod)
	}
	answer, err := k.Runtime.ContainerStatus(limited(k.t), &runtimeapi.ContainerStatusRequest{ContainerId: list.Containers[0].Id})
	check(k.t, err)
	return answer.Status
}

// running tells for each pod and container that runs what it would lose if it
// was started again: id and process.
func (k *kubelet) running() map[string]string {
	k.t.Helper()
	pods, err := k.Runtime.ListPodSandbox(limited(k.t), &runtimeapi.ListPodSandboxRequest{
		Filter: &runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY}},
	})
	check(k.t, err)
	found := make(map[string]string)
	for _, pod := range pods.Items {
		answer, err := k.Runtime.PodSandboxStatus(limited(k.t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod.Id, Verbose: true})
		check(k.t, err)
		found[pod.Metadata.Name] = pod.Id + " " + k.pid(answer.Info)
	}
	containers, err := k.Runtime.ListContainers(limited(k.t), &runtimeapi.ListContainersRequest{
		Filter: &runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}},
	})
	check(k.t, err)
	for _, c := range containers.Containers {
		answer, err := k.Runtime.ContainerStatus(limited(k.t), &runtimeapi.ContainerStatusRequest{ContainerId: c.Id, Verbose: true})
		check(k.t, err)
		found[c.Labels[podLabel]+"/"+c.Metadata.Name] = c.Id + " " + k.pid(answer.Info)
	}
	return found
}

func (k *kubelet) pid(verbose map[string]string) string {
	k.t.Helper()
	var info struct {
		PID int `json:"pid"`
	}
	check(k.t, json.Unmarshal([]byte(verbose["info"]), &info))
	if info.PID == 0 {
		k.t.Errorf("no pid in %v", verbose)
	}
	return fmt.Sprint(info.PID)
}

// empty reports whether the runtime has neither pods nor containers.
func (k *kubelet) empty() bool {
	k.t.Helper()
	pods, err := k.Runtime.ListPodSandbox(limited(k.t), &runtimeapi.ListPodSandboxRequest{})
	check(k.t, err)
	containers, err := k.Runtime.ListContainers(limited(k.t), &runtimeapi.ListContainersRequest{})
	check(k.t, err)
	return len(pods.Items)+len(containers.Containers) == 0
}
