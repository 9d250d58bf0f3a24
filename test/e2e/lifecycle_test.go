package e2e

import (
	"errors"
	"io"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// cri: PodSandbox.created_at PodSandbox.labels PodSandbox.metadata PodSandboxStatus.labels
// cri: PodSandboxConfig.labels PodSandboxStatus.annotations RemovePodSandbox RunPodSandbox StopPodSandbox
func TestLifeOfAPod(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web", harness.Attempt(3))
	config.Annotations = map[string]string{"example.org/a b": "x=\"1\"\n\tü", "empty": ""}
	config.Labels["app"] = "web"
	id := n.RunPod(config)

	status := podStatus(t, n, id)
	if status.Id != id || status.State != runtimeapi.PodSandboxState_SANDBOX_READY || status.CreatedAt <= 0 {
		t.Errorf("got %v", status)
	}
	if !proto.Equal(status.Metadata, config.Metadata) || status.Metadata.Attempt != 3 {
		t.Errorf("metadata are %v", status.Metadata)
	}
	if !mapsEqual(status.Labels, config.Labels) || !mapsEqual(status.Annotations, config.Annotations) {
		t.Errorf("labels %v, annotations %v", status.Labels, status.Annotations)
	}
	if pod := list(t, n, nil)[0]; pod.CreatedAt != status.CreatedAt || pod.State != status.State || !proto.Equal(pod.Metadata, status.Metadata) || !mapsEqual(pod.Labels, status.Labels) {
		t.Errorf("listed as %v, status %v", pod, status)
	}
	if held := addresses(t, n); !slices.Equal(held, []string{status.Network.Ip}) {
		t.Errorf("status says %s, host-local %v", status.Network.Ip, held)
	}

	check(t, stop(t, n, id))
	status = podStatus(t, n, id)
	if status.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY || status.Network.GetIp() != "" || len(addresses(t, n)) != 0 {
		t.Errorf("after Stop: %v", status)
	}
	check(t, remove(t, n, id))
	_, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	wantCode(t, err, codes.NotFound)
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("listed after Remove: %v", pods)
	}
}

func mapsEqual(a, b map[string]string) bool {
	return proto.Equal(&runtimeapi.PodSandbox{Labels: a}, &runtimeapi.PodSandbox{Labels: b})
}

func TestVerbosePodStatus(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web")
	id := n.RunPod(config)
	info := verbose(t, n, id)
	if info.PID <= 1 || info.NetNamespace == "" || info.NetNamespaceClosed || info.RuntimeSpec.OCIVersion == "" || len(info.CNIResult) < 10 {
		t.Errorf("got %+v", info)
	}
	var stored runtimeapi.PodSandboxConfig
	check(t, protojson.Unmarshal(info.Config, &stored))
	if !proto.Equal(&stored, config) {
		t.Errorf("the config is %v", &stored)
	}
	if len(info.Timeline) < 8 {
		t.Errorf("the timeline has %v", info.Timeline)
	}
	check(t, stop(t, n, id))
	if info := verbose(t, n, id); !info.NetNamespaceClosed {
		t.Errorf("after Stop: %+v", info)
	}
}

// cri: ListPodSandbox PodSandboxFilter.id PodSandboxFilter.label_selector PodSandboxFilter.state
// cri: PodSandboxStateValue.state StreamPodSandboxes StreamPodSandboxesRequest.filter
// cri: StreamPodSandboxesResponse.pod_sandboxes
func TestListFilters(t *testing.T) {
	n := newNode(t)
	a := n.RunPod(n.PodConfig("a"))
	b := n.RunPod(n.PodConfig("b"))
	check(t, stop(t, n, b))
	const isReady, notReady = runtimeapi.PodSandboxState_SANDBOX_READY, runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	state := func(s runtimeapi.PodSandboxState) *runtimeapi.PodSandboxStateValue {
		return &runtimeapi.PodSandboxStateValue{State: s}
	}
	label := func(value string) map[string]string { return map[string]string{"io.kubernetes.pod.name": value} }
	for name, c := range map[string]struct {
		filter *runtimeapi.PodSandboxFilter
		want   []string
	}{
		"none":             {nil, []string{b, a}},
		"empty":            {&runtimeapi.PodSandboxFilter{}, []string{b, a}},
		"id":               {&runtimeapi.PodSandboxFilter{Id: a}, []string{a}},
		"start of an id":   {&runtimeapi.PodSandboxFilter{Id: a[:12]}, []string{a}},
		"ready":            {&runtimeapi.PodSandboxFilter{State: state(isReady)}, []string{a}},
		"not ready":        {&runtimeapi.PodSandboxFilter{State: state(notReady)}, []string{b}},
		"label":            {&runtimeapi.PodSandboxFilter{LabelSelector: label("b")}, []string{b}},
		"label and state":  {&runtimeapi.PodSandboxFilter{LabelSelector: label("b"), State: state(isReady)}, nil},
		"label of nothing": {&runtimeapi.PodSandboxFilter{LabelSelector: label("c")}, nil},
	} {
		if got := ids(list(t, n, c.filter)); !slices.Equal(got, c.want) {
			t.Errorf("%s: want %v, got %v", name, c.want, got)
		}
		if got := ids(stream(t, n, c.filter)); !slices.Equal(got, c.want) {
			t.Errorf("%s: streamed: want %v, got %v", name, c.want, got)
		}
	}
}

func ids(pods []*runtimeapi.PodSandbox) []string {
	var ids []string
	for _, pod := range pods {
		ids = append(ids, pod.Id)
	}
	return ids
}

// stream collects StreamPodSandboxes; a message without a pod is an error.
func stream(t *testing.T, n *harness.Node, filter *runtimeapi.PodSandboxFilter) []*runtimeapi.PodSandbox {
	t.Helper()
	client, err := n.Runtime.StreamPodSandboxes(limited(t), &runtimeapi.StreamPodSandboxesRequest{Filter: filter})
	check(t, err)
	var pods []*runtimeapi.PodSandbox
	for {
		message, err := client.Recv()
		if errors.Is(err, io.EOF) {
			return pods
		}
		check(t, err)
		if len(message.PodSandboxes) == 0 {
			t.Error("a message of the stream has no pod")
		}
		pods = append(pods, message.PodSandboxes...)
	}
}

// cri: PodSandboxStatus.id
func TestUniqueStartOfAnIDWillDo(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	if got := podStatus(t, n, id[:10]).Id; got != id {
		t.Errorf("want %s, got %s", id, got)
	}
	check(t, stop(t, n, id[:10]))
	check(t, remove(t, n, id[:10]))
}

func TestProperty28_StopAndRemoveTwiceAndAtOnce(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("twice"))
	for range 2 {
		check(t, stop(t, n, id))
	}
	for range 2 {
		check(t, remove(t, n, id))
	}
	id = n.RunPod(n.PodConfig("at-once"))
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			call := stop
			if i%2 == 1 {
				call = remove
			}
			if err := call(t, n, id); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("left: %v", pods)
	}
}

// cri: PodSandboxStatus PodSandboxStatusRequest.pod_sandbox_id
func TestProperty29_UnknownIDs(t *testing.T) {
	n := newNode(t)
	for _, id := range []string{"0123456789abcdef", "no-such-pod", "../../etc"} {
		_, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
		wantCode(t, err, codes.NotFound)
		check(t, stop(t, n, id))
		check(t, remove(t, n, id))
	}
	_, err := n.Runtime.PodSandboxStatus(limited(t), &runtimeapi.PodSandboxStatusRequest{})
	wantCode(t, err, codes.InvalidArgument)
}

// cri: PodSandboxStatus.runtime_handler RunPodSandboxRequest.runtime_handler
// cri: RunPodSandboxResponse.pod_sandbox_id
func TestUnknownHandler(t *testing.T) {
	n := newNode(t)
	_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "kata"})
	wantCode(t, err, codes.InvalidArgument)
	answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "runc"})
	check(t, err)
	if handler := podStatus(t, n, answer.PodSandboxId).RuntimeHandler; handler != "runc" {
		t.Errorf("the handler is %q", handler)
	}
}

// cri: PodSandboxStatus.created_at
func TestProperty30_CreatedAtGrows(t *testing.T) {
	n := newNode(t)
	var last int64
	for attempt := range uint32(4) {
		id := n.RunPod(n.PodConfig("web", harness.Attempt(attempt)))
		if created := podStatus(t, n, id).CreatedAt; created <= last {
			t.Errorf("attempt %d was created at %d, the one before at %d", attempt, created, last)
		} else {
			last = created
		}
		check(t, stop(t, n, id))
		if attempt == 1 {
			n.Restart()
		}
	}
}
