package container

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

type eventStream = runtimeapi.RuntimeService_GetContainerEventsClient

// listen subscribes to the node's events. It returns when they are sure to
// come: there is no answer to a subscription, so it makes events until one does.
func (p *pod) listen() eventStream {
	p.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p.t.Cleanup(cancel)
	stream, err := p.Runtime.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	check(p.t, err)
	arrived := make(chan error, 1)
	go func() {
		_, err := stream.Recv()
		arrived <- err
	}()
	for {
		marker := p.create(shell("marker", "true"))
		check(p.t, p.remove(marker))
		select {
		case err := <-arrived:
			check(p.t, err)
			return stream
		default:
		}
	}
}

// events reads the events of the containers with these names, or of pods, up to
// the one that is last, each as "name what: state of the pod, states of its
// containers".
func (p *pod) events(stream eventStream, last string) (all []string) {
	p.t.Helper()
	names, latest := map[string]string{p.id: "pod"}, int64(0)
	for len(all) == 0 || !strings.HasPrefix(all[len(all)-1], last) {
		event, err := stream.Recv()
		check(p.t, err)
		if event.CreatedAt <= latest {
			p.t.Errorf("an event of %d comes after one of %d", event.CreatedAt, latest)
		}
		latest = event.CreatedAt
		var states []string
		for _, c := range event.ContainersStatuses {
			names[c.Id] = c.Metadata.Name
			states = append(states, fmt.Sprintf("%s %v", c.Metadata.Name, strings.TrimPrefix(c.State.String(), "CONTAINER_")))
		}
		slices.Sort(states)
		kind := strings.TrimSuffix(strings.TrimPrefix(event.ContainerEventType.String(), "CONTAINER_"), "_EVENT")
		state := strings.TrimPrefix(event.PodSandboxStatus.GetState().String(), "SANDBOX_")
		if name := names[event.ContainerId]; name != "" && name != "marker" {
			all = append(all, fmt.Sprintf("%s %s: %s %s", name, kind, state, strings.Join(states, ", ")))
		}
	}
	return all
}

func TestEventsOfAPodsLife(t *testing.T) {
	p := newPod(t)
	stream := p.listen()
	one := p.run("one", forever)
	bad := p.create(shell("two", "", command("/no/such")))
	if err := p.start(bad); err == nil {
		t.Error("a program that does not exist was started")
	}
	check(t, p.remove(bad))
	check(t, p.stop(one, 10))
	check(t, p.remove(one))
	three := p.run("three", forever)
	check(t, unix.Kill(p.info(three).PID, unix.SIGKILL))
	p.wantExit(three, 137, "Error")
	p.RemovePod(p.id)
	same(t, "events", "\n"+strings.Join(p.events(stream, "pod DELETED"), "\n"), `
one CREATED: READY one CREATED
one STARTED: READY one RUNNING
two CREATED: READY one RUNNING, two CREATED
two STOPPED: READY one RUNNING, two EXITED
two DELETED: READY one RUNNING
one STOPPED: READY one EXITED
one DELETED: READY `+`
three CREATED: READY three CREATED
three STARTED: READY three RUNNING
three STOPPED: READY three EXITED
pod STOPPED: NOTREADY three EXITED
three DELETED: NOTREADY `+`
pod DELETED: NOTREADY `)
}

// A consumer that does not read holds up neither containers nor other
// consumers. It gets all of it later, in the same order; or, when it is too far
// behind, what was kept for it and an error that says so (package event).
//
// cri: ContainerEventResponse.container_event_type ContainerEventResponse.container_id
// cri: ContainerEventResponse.containers_statuses ContainerEventResponse.created_at
// cri: ContainerEventResponse.pod_sandbox_status ContainerMetadata.attempt ContainerStatus.id
// cri: ContainerStatus.metadata GetContainerEvents
func TestP32_ConsumerThatDoesNotRead(t *testing.T) {
	p := newPod(t)
	lazy, busy := p.listen(), p.listen()
	const rounds = 50
	for i := range uint32(rounds) {
		check(t, p.remove(p.create(shell("round", "true", attempt(i)))))
	}
	last := p.run("last", "true")
	p.wantExit(last, 0, "Completed")
	read := p.events(busy, "last STOPPED")
	if got := len(read); got < 3*rounds {
		t.Errorf("%d events of %d rounds: %v", got, rounds, read)
	}
	same(t, "what the lazy one reads", strings.Join(p.events(lazy, "last STOPPED"), "\n"), strings.Join(read, "\n"))
	p.Stop()
	if _, err := busy.Recv(); err == nil || err == io.EOF {
		t.Errorf("the stream of a daemon that has ended gave %v", err)
	}
	p.Start()
}
