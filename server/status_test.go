package server

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// listen subscribes, and returns once events are sure to come.
func listen(t *testing.T, runtime *Runtime, client runtimeapi.RuntimeServiceClient) runtimeapi.RuntimeService_GetContainerEventsClient {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	stream, err := client.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	must(t, err)
	arrived := make(chan error, 1)
	go func() {
		_, err := stream.Recv()
		arrived <- err
	}()
	for {
		runtime.Events.Publish("first", runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT,
			func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) { return nil, nil })
		select {
		case err := <-arrived:
			must(t, err)
			return stream
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func nextEvent(t *testing.T, stream runtimeapi.RuntimeService_GetContainerEventsClient) *runtimeapi.ContainerEventResponse {
	t.Helper()
	for {
		event, err := stream.Recv()
		must(t, err)
		if event.GetContainerId() != "first" {
			return event
		}
	}
}

func TestEventsOfAPodThatDies(t *testing.T) {
	runtime := restored(t, stored{id: "aa11", config: podConfig("web", map[string]string{"app": "web"}), ready: true})
	client := dial(t, runtime)
	stream := listen(t, runtime, client)
	sb, err := runtime.Sandboxes.Find("aa11")
	must(t, err)
	pause := sb.Facts().Pause.PID
	if pause <= 0 { // kill(2) takes 0 for our process group
		t.Fatalf("the pause is process %d", pause)
	}
	must(t, unix.Kill(pause, unix.SIGKILL))
	stopped := nextEvent(t, stream)
	if _, err := client.RemovePodSandbox(t.Context(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: "aa11"}); err != nil {
		t.Fatal(err)
	}
	deleted := nextEvent(t, stream)
	for event, kind := range map[*runtimeapi.ContainerEventResponse]runtimeapi.ContainerEventType{
		stopped: runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT,
		deleted: runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT,
	} {
		pod := event.GetPodSandboxStatus()
		if event.GetContainerEventType() != kind || event.GetContainerId() != "aa11" || pod.GetId() != "aa11" ||
			pod.GetState() != runtimeapi.PodSandboxState_SANDBOX_NOTREADY || pod.GetMetadata().GetName() != "web" {
			t.Errorf("the event is %v, want %v of a pod that is not ready", event, kind)
		}
	}
	if stopped.GetCreatedAt() >= deleted.GetCreatedAt() {
		t.Errorf("stopped at %d, deleted at %d", stopped.GetCreatedAt(), deleted.GetCreatedAt())
	}
}

func TestEventStreamEndsWithTheDaemon(t *testing.T) {
	runtime := restored(t)
	stream := listen(t, runtime, dial(t, runtime))
	runtime.Events.Close()
	for {
		_, err := stream.Recv()
		if err == nil {
			continue
		}
		if status.Code(err) != codes.Unavailable {
			t.Errorf("the stream ended with %v", err)
		}
		return
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
