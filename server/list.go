package server

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// matches compares the beginning of an id, and all labels that are wanted.
func matches(id, wantedID string, labels, wanted map[string]string) bool {
	for key, value := range wanted {
		if got, has := labels[key]; !has || got != value {
			return false
		}
	}
	return strings.HasPrefix(id, wantedID)
}

func podMatches(sb *sandbox.Sandbox, filter *runtimeapi.PodSandboxFilter) bool {
	state := filter.GetState()
	return matches(sb.ID, filter.GetId(), sb.Config().GetLabels(), filter.GetLabelSelector()) && (state == nil || state.GetState() == podState(sb))
}

func containerMatches(c *container.Container, filter *runtimeapi.ContainerFilter) bool {
	state := filter.GetState()
	return matches(c.ID, filter.GetId(), c.Config().GetLabels(), filter.GetLabelSelector()) &&
		strings.HasPrefix(c.SandboxID, filter.GetPodSandboxId()) && (state == nil || state.GetState() == c.State())
}

const pieceBytes = 1 << 20 // far below every limit of gRPC, and enough for some hundred pods

// sendPieces cuts a list by size: one pod's annotations may be as large as a thousand other pods.
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

// maxAnswer bounds a list in one message. The kubelet takes a node with more than 16 MiB for dead.
const maxAnswer = 15 << 20

// keptTexts are what the kubelet needs to know a pod or container as its own, and to end one without a pod
// (k8s.io/kubelet/pkg/types, kuberuntime/labels.go). fit drops them only if they exceed maxKept bytes.
var keptTexts = []string{
	"io.kubernetes.pod.name", "io.kubernetes.pod.namespace", "io.kubernetes.pod.uid", "io.kubernetes.container.name",
	"io.kubernetes.pod.deletionGracePeriod", "io.kubernetes.pod.terminationGracePeriod",
	"io.kubernetes.container.hash", "io.kubernetes.container.restartCount",
	"io.kubernetes.container.terminationMessagePath", "io.kubernetes.container.terminationMessagePolicy",
}

const maxKept = 1 << 10

// fit drops the longest labels and annotations from a copy of a message that is too long: the kubelet cannot
// work without a list. validate.Listed bounds the rest.
func fit[M proto.Message](message M) M {
	excess := proto.Size(message) - maxAnswer
	if excess <= 0 {
		return message
	}
	message = proto.CloneOf(message)
	var sizes []int
	eachText(message.ProtoReflect(), func(_ protoreflect.Map, _ protoreflect.MapKey, size int) { sizes = append(sizes, size) })
	slices.Sort(sizes)
	longest := 1 // what is as long as this, or longer, is left out
	for i := len(sizes) - 1; i >= 0 && excess > 0 && sizes[i] > 0; i-- {
		longest = sizes[i]
		excess -= longest
	}
	eachText(message.ProtoReflect(), func(texts protoreflect.Map, key protoreflect.MapKey, size int) {
		if size >= longest {
			texts.Clear(key)
		}
	})
	return message
}

// fitMetrics leaves the oldest pods out of a list that is too long: metrics have no texts that fit could drop.
func fitMetrics(newestFirst []*runtimeapi.PodSandboxMetrics) []*runtimeapi.PodSandboxMetrics {
	left := maxAnswer
	return slices.DeleteFunc(newestFirst, func(pod *runtimeapi.PodSandboxMetrics) bool {
		left -= proto.Size(pod) + 8 // its tag and length
		return left < 0
	})
}

// eachText calls do for each label and annotation in a message, with its size, or 0 if it is kept.
func eachText(message protoreflect.Message, do func(texts protoreflect.Map, key protoreflect.MapKey, size int)) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap() && (field.Name() == "labels" || field.Name() == "annotations"):
			value.Map().Range(func(key protoreflect.MapKey, text protoreflect.Value) bool {
				size := len(key.String()) + len(text.String())
				if len(text.String()) <= maxKept && slices.Contains(keptTexts, key.String()) {
					size = 0
				}
				do(value.Map(), key, size)
				return true
			})
		case field.Message() == nil || field.IsMap():
		case field.IsList():
			for i := range value.List().Len() {
				eachText(value.List().Get(i).Message(), do)
			}
		default:
			eachText(value.Message(), do)
		}
		return true
	})
}
