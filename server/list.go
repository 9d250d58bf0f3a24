package server

import (
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// matches: a nil filter takes all, and of a filter every field has to match.
// An id may be the start of one.
func matches(sb *sandbox.Sandbox, filter *runtimeapi.PodSandboxFilter) bool {
	if !strings.HasPrefix(sb.ID, filter.GetId()) {
		return false
	}
	if state := filter.GetState(); state != nil && state.GetState() != podState(sb) {
		return false
	}
	return hasLabels(sb.Config().GetLabels(), filter.GetLabelSelector())
}

// matchesContainer is the same for containers.
func matchesContainer(c *container.Container, filter *runtimeapi.ContainerFilter) bool {
	if !strings.HasPrefix(c.ID, filter.GetId()) || !strings.HasPrefix(c.SandboxID, filter.GetPodSandboxId()) {
		return false
	}
	if state := filter.GetState(); state != nil && state.GetState() != c.State() {
		return false
	}
	return hasLabels(c.Config().GetLabels(), filter.GetLabelSelector())
}

func hasLabels(labels, wanted map[string]string) bool {
	for key, value := range wanted {
		if got, has := labels[key]; !has || got != value {
			return false
		}
	}
	return true
}

// pieceBytes is the size at which a message of a stream is sent: far below
// every limit of gRPC, and large enough for some hundred pods.
const pieceBytes = 1 << 20

// sendPieces sends a list in messages that are cut by size: a pod's annotations
// may be as large as a thousand other pods. An object that is larger than a
// piece is sent alone.
func sendPieces[T proto.Message](list []T, send func([]T) error) error {
	begin, size := 0, 0
	for i, object := range list {
		next := proto.Size(object)
		if i > begin && size+next > pieceBytes {
			if err := send(list[begin:i]); err != nil {
				return err
			}
			begin, size = i, 0
		}
		size += next
	}
	if begin == len(list) {
		return nil
	}
	return send(list[begin:])
}

// mostAnswer is what a list may take as one message: the kubelet and crictl read
// 16 MiB, and take a node whose list is longer for dead. Streams have no limit.
const mostAnswer = 15 << 20

// keptTexts are the labels and annotations by which the kubelet knows a pod and a
// container for its own, and how it ends one that has no pod any more
// (k8s.io/kubelet/pkg/types, kuberuntime/labels.go): they are never left out,
// unless another client of the API server has written a long text there.
var keptTexts = []string{
	"io.kubernetes.pod.name", "io.kubernetes.pod.namespace", "io.kubernetes.pod.uid", "io.kubernetes.container.name",
	"io.kubernetes.pod.deletionGracePeriod", "io.kubernetes.pod.terminationGracePeriod",
	"io.kubernetes.container.hash", "io.kubernetes.container.restartCount",
	"io.kubernetes.container.terminationMessagePath", "io.kubernetes.container.terminationMessagePolicy",
}

// mostKept is how long one of them may be.
const mostKept = 1 << 10

// droppable is what a text counts that may be left out, 0 for one that may not.
func droppable(key, value string) int {
	if len(value) <= mostKept && slices.Contains(keptTexts, key) {
		return 0
	}
	return len(key) + len(value)
}

// fit leaves labels and annotations out of a message that is too long, the longest
// first, until it fits: a list without some texts is one that the kubelet can work
// with, whose own are kept; none is not. texts are the maps of the message; those
// of the pods' configurations stay as they are. What is left then has a limit of
// its own (validate.Listed).
func fit(message proto.Message, texts []*map[string]string) {
	excess := proto.Size(message) - mostAnswer
	if excess <= 0 {
		return
	}
	var sizes []int
	for _, text := range texts {
		for key, value := range *text {
			sizes = append(sizes, droppable(key, value))
		}
	}
	slices.Sort(sizes)
	longest := 1 // what is as long as this, or longer, is left out
	for i := len(sizes) - 1; i >= 0 && excess > 0 && sizes[i] > 0; i-- {
		longest = sizes[i]
		excess -= longest
	}
	for _, text := range texts {
		short := maps.Clone(*text)
		maps.DeleteFunc(short, func(key, value string) bool { return droppable(key, value) >= longest })
		*text = short
	}
}

func fitPods(list *runtimeapi.ListPodSandboxResponse) *runtimeapi.ListPodSandboxResponse {
	var texts []*map[string]string
	for _, pod := range list.Items {
		texts = append(texts, &pod.Labels, &pod.Annotations)
	}
	fit(list, texts)
	return list
}

func fitContainers(list *runtimeapi.ListContainersResponse) *runtimeapi.ListContainersResponse {
	var texts []*map[string]string
	for _, container := range list.Containers {
		texts = append(texts, &container.Labels, &container.Annotations)
	}
	fit(list, texts)
	return list
}

func fitContainerStats(list *runtimeapi.ListContainerStatsResponse) *runtimeapi.ListContainerStatsResponse {
	fit(list, textsOfStats(list.Stats))
	return list
}

func fitPodStats(list *runtimeapi.ListPodSandboxStatsResponse) *runtimeapi.ListPodSandboxStatsResponse {
	var texts []*map[string]string
	for _, pod := range list.Stats {
		texts = append(texts, &pod.Attributes.Labels, &pod.Attributes.Annotations)
		texts = append(texts, textsOfStats(pod.GetLinux().GetContainers())...)
	}
	fit(list, texts)
	return list
}

func textsOfStats(containers []*runtimeapi.ContainerStats) (texts []*map[string]string) {
	for _, container := range containers {
		texts = append(texts, &container.Attributes.Labels, &container.Attributes.Annotations)
	}
	return texts
}

// fitStatuses is for a pod with the statuses of all its containers, in an event or
// an answer.
func fitStatuses(message proto.Message, pod *runtimeapi.PodSandboxStatus, containers []*runtimeapi.ContainerStatus) {
	var texts []*map[string]string
	if pod != nil {
		texts = append(texts, &pod.Labels, &pod.Annotations)
	}
	for _, container := range containers {
		texts = append(texts, &container.Labels, &container.Annotations)
	}
	fit(message, texts)
}
