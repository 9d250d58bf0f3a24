package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

func TestGRPCError(t *testing.T) {
	wrapped := func(err error) error { return fmt.Errorf("run sandbox 4e5f: cni add: %w", err) }
	for _, test := range []struct {
		err  error
		code codes.Code
	}{
		{errdefs.ErrInvalidArgument, codes.InvalidArgument},
		{errdefs.ErrNotFound, codes.NotFound},
		{errdefs.ErrAlreadyExists, codes.AlreadyExists},
		{errdefs.ErrFailedPrecondition, codes.FailedPrecondition},
		{errdefs.ErrNotImplemented, codes.Unimplemented},
		{errdefs.ErrUnauthenticated, codes.Unauthenticated},
		{errdefs.ErrPermissionDenied, codes.PermissionDenied},
		{errdefs.ErrResourceExhausted, codes.ResourceExhausted},
		{errdefs.ErrUnavailable, codes.Unavailable},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
		{errors.New("no kind at all"), codes.Unknown},
		{status.Error(codes.DataLoss, "has a code"), codes.DataLoss},
		// Of a joined error the first kind of the table counts.
		{errors.Join(errors.New("one"), errdefs.ErrNotFound), codes.NotFound},
		{errors.Join(context.Canceled, errdefs.ErrInvalidArgument), codes.InvalidArgument},
	} {
		for _, err := range []error{test.err, wrapped(test.err)} {
			got := grpcError(err)
			harness.Want(t, status.Code(got) == test.code, "%v has code %v, want %v", err, status.Code(got), test.code)
			s, ok := status.FromError(got)
			harness.Want(t, ok && s.Message() != "", "%v became %v, which is no gRPC error", err, got)
		}
	}
	harness.Check(t, grpcError(nil))
}

// A panic is an error of its call alone.
func TestAPanicIsAnErrorOfItsCall(t *testing.T) {
	client := dial(t, &Runtime{}) // everything that needs a sandbox panics
	for range 2 {
		_, err := client.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
		nodetest.WantCode(t, err, codes.Internal)
		stream, err := client.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		nodetest.WantCode(t, err, codes.Internal)
		_, err = client.Version(t.Context(), &runtimeapi.VersionRequest{})
		harness.Want(t, err == nil, "the next call: %v", err)
	}
}

// What the message says for people the details say for programs.
func TestErrorsHaveFields(t *testing.T) {
	plugin := &network.PluginError{Network: "net", Plugin: step.Plugin{Name: "host-local", Verb: "ADD", Code: 11, Message: "no address", Stderr: "last words"}, Advice: "remove pods"}
	err := grpcError(fmt.Errorf("run sandbox x: %w", &step.Error{Step: "pod/cni add", Err: fmt.Errorf("CNI ADD: %w", plugin)}))
	answer := status.Convert(err)
	want := "run sandbox x: cni add: CNI ADD: plugin host-local: no address (CNI error code 11): remove pods"
	harness.Want(t, answer.Message() == want && answer.Code() == codes.Unknown, "%v %q", answer.Code(), answer.Message())
	harness.Need(t, len(answer.Details()) == 2, "details %v", answer.Details())
	info := answer.Details()[0].(*errdetails.ErrorInfo)
	for key, want := range map[string]string{
		"step": "pod/cni add", "network": "net", "plugin": "host-local", "verb": "ADD", "cni_code": "11", "cni_message": "no address", "advice": "remove pods",
	} {
		harness.Same(t, key, info.GetMetadata()[key], want)
	}
	harness.Want(t, info.GetDomain() == "minicri" && info.GetReason() == "CNI_PLUGIN_FAILED", "%v", info)
	debug := answer.Details()[1].(*errdetails.DebugInfo)
	harness.Want(t, debug.GetDetail() == "last words", "%v", debug)
}

// A step that failed without a plugin is named; an error of no step has no fields.
func TestErrorsOfStepsAndOfNone(t *testing.T) {
	failed := status.Convert(grpcError(&step.Error{Step: "container/check", Err: errdefs.ErrNotFound}))
	harness.Want(t, failed.Code() == codes.NotFound, "%v", failed)
	harness.Want(t, len(failed.Details()) == 1, "%v", failed)
	harness.Want(t, failed.Details()[0].(*errdetails.ErrorInfo).GetMetadata()["step"] == "container/check",
		"%v", failed)
	none := status.Convert(grpcError(errdefs.ErrNotFound))
	harness.Want(t, len(none.Details()) == 0, "%v", none.Details())
	pull := status.Convert(grpcError(fmt.Errorf("pull x: %w", image.ErrRegistryUnavailable)))
	harness.Want(t, pull.Code() == codes.Unknown && len(pull.Message()) >= 40, "%v", pull)
}

// Every call that the daemon serves either changes nothing, which its name says, or is waited for at a shutdown.
func TestCallsThatChangeSomethingAreWaitedFor(t *testing.T) {
	reading := []string{
		"List", "Stream", "Status", "Version", "RuntimeConfig", "PodSandboxStatus", "PodSandboxStats", "ContainerStatus", "ContainerStats",
		"GetContainerEvents", "ImageStatus", "ImageFsInfo",
		"Exec", "Attach", "PortForward", // they make URLs; the sessions are the stream server's
	}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, &Runtime{})
	runtimeapi.RegisterImageServiceServer(server, &ImageServer{})
	served := 0
	for _, service := range server.GetServiceInfo() {
		for _, method := range service.Methods {
			served++
			name := path.Base(method.Name)
			reads := slices.Contains(reading, name) || strings.HasPrefix(name, "List") || strings.HasPrefix(name, "Stream")
			harness.Want(t, reads != slices.Contains(changing, name), "%s: is in the list of calls that change something: %v", name, !reads)
		}
	}
	harness.Want(t, served >= 40, "%d calls are served", served)
}

// cri: Version VersionRequest.version VersionResponse.runtime_api_version VersionResponse.runtime_name
// cri: VersionResponse.runtime_version VersionResponse.version
func TestVersion(t *testing.T) {
	version, err := dial(t, &Runtime{Info: Info{Version: "1.2.3"}}).Version(t.Context(), &runtimeapi.VersionRequest{Version: "0.1.0"})
	must(t, err)
	harness.Want(t, version.GetVersion() == "0.1.0", "version %v", version)
	harness.Want(t, version.GetRuntimeName() == "minicri", "version %v", version)
	harness.Want(t, version.GetRuntimeVersion() == "1.2.3", "version %v", version)
	harness.Want(t, version.GetRuntimeApiVersion() == "v1", "version %v", version)
}

// A stream has all of a list in its order, in pieces that are cut by size; what is larger than a piece is sent alone.
func TestSendPieces(t *testing.T) {
	for _, test := range []struct{ count, annotation, messages int }{{0, 0, 0}, {1, 0, 1}, {250, 0, 1}, {100, 256 << 10, 34}, {3, 2 * pieceBytes, 3}} {
		var list, sent []*runtimeapi.PodSandbox
		for i := range test.count {
			list = append(list, &runtimeapi.PodSandbox{Id: fmt.Sprint(i), Annotations: map[string]string{"note": strings.Repeat("x", test.annotation)}})
		}
		messages := 0
		must(t, sendPieces(list, func(piece []*runtimeapi.PodSandbox) error {
			messages++
			sent = append(sent, piece...)
			return nil
		}))
		harness.Want(t, slices.Equal(sent, list) && messages == test.messages,
			"%d pods with %d bytes: %d in %d messages", test.count, test.annotation, len(sent), messages)
	}
}

// A list that is empty is one, and not null.
func TestEmptyListsOfVerboseAnswers(t *testing.T) {
	var none []string
	info, err := encodeInfo(map[string]any{"quarantinedRecords": none, "version": "1"})
	harness.Need(t, err == nil, "%v, %v", info, err)
	harness.Want(t, info["quarantinedRecords"] == `{"items":[]}`, "%v, %v", info, err)
	harness.Want(t, info["version"] == `"1"`, "%v, %v", info, err)
}

// dial serves the runtime on a unix socket and connects to it.
func dial(t *testing.T, runtime *Runtime) runtimeapi.RuntimeServiceClient {
	return runtimeapi.NewRuntimeServiceClient(serveOnSocket(t, New(runtime, nil, slog.New(slog.DiscardHandler))))
}

func serveOnSocket(t testing.TB, server *grpc.Server) *grpc.ClientConn {
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() {
		_ = connection.Close()
		server.Stop()
		must(t, <-served)
	})
	return connection
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }

// Statistics and events that are too long for one message lose their longest texts, as lists do; what fits loses none.
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
		harness.Want(t, size <= maxAnswer, "%T of %d bytes", message, size)
	}
	small := &runtimeapi.ListPodSandboxResponse{Items: []*runtimeapi.PodSandbox{{Annotations: much}}}
	harness.Want(t, len(fit(small).Items[0].Annotations["much"]) == 1<<20, "a list that fits has lost a text")
}

// Metrics have no texts to lose: what is too long for one message lacks the oldest pods, and what fits lacks none.
func TestFitMetrics(t *testing.T) {
	for count, whole := range map[int]bool{10: true, 40: false, 20 << 10: false} {
		list := &runtimeapi.ListPodSandboxMetricsResponse{}
		for i := range count {
			metric := &runtimeapi.Metric{Name: strings.Repeat("x", 20<<20/max(count, 20))}
			list.PodMetrics = append(list.PodMetrics, &runtimeapi.PodSandboxMetrics{PodSandboxId: fmt.Sprint(i), Metrics: []*runtimeapi.Metric{metric}})
		}
		list.PodMetrics = fitMetrics(list.PodMetrics)
		size, left := proto.Size(list), len(list.PodMetrics)
		harness.Want(t, size <= maxAnswer, "%d of %d pods in %d bytes", left, count, size)
		harness.Want(t, (left == count) == whole, "%d of %d pods in %d bytes", left, count, size)
		harness.Want(t, left >= min(count, count*7/10), "%d of %d pods in %d bytes", left, count, size)
		harness.Want(t, list.PodMetrics[left-1].PodSandboxId == fmt.Sprint(left-1), "not the oldest of %d pods are left out", count)
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
	list = fit(list)
	harness.Want(t, proto.Size(list) <= maxAnswer, "%d bytes", proto.Size(list))
	for i, pod := range list.Items {
		harness.Want(t, pod.Labels["io.kubernetes.pod.namespace"] == namespace && pod.Labels["io.kubernetes.pod.uid"] == fmt.Sprint(i),
			"pod %d has lost what the kubelet knows it by", i)
	}
}

const created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT

func nothing() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) { return nil, nil }

func subscribed(t *testing.T, b *Broadcaster) *Subscription {
	s, err := b.Subscribe()
	must(t, err)
	return s
}

func next(t *testing.T, s *Subscription) *runtimeapi.ContainerEventResponse {
	event, err := s.Next(t.Context())
	must(t, err)
	return event
}

func TestEventsOfManyPublishersComeInOneOrder(t *testing.T) {
	b := NewBroadcaster()
	subscriptions := []*Subscription{subscribed(t, b), subscribed(t, b)}
	const publishers, each = 8, 100
	state := int64(0) // of the pod; guarded by the broadcaster, as looks are
	look := func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
		state++
		return &runtimeapi.PodSandboxStatus{CreatedAt: state}, nil
	}
	var publishing sync.WaitGroup
	for publisher := range publishers {
		publishing.Go(func() {
			for i := range each {
				b.Publish(fmt.Sprintf("%d %d", publisher, i), created, look)
			}
		})
	}
	publishing.Wait()
	for _, s := range subscriptions {
		last, of := &runtimeapi.ContainerEventResponse{PodSandboxStatus: &runtimeapi.PodSandboxStatus{}}, make(map[int]int)
		for range publishers * each {
			event := next(t, s)
			harness.Need(t, event.GetCreatedAt() > last.GetCreatedAt() &&
				event.GetPodSandboxStatus().GetCreatedAt() == last.GetPodSandboxStatus().GetCreatedAt()+1, "%v comes after %v", event, last)
			last = event
			var publisher, i int
			if _, err := fmt.Sscan(event.GetContainerId(), &publisher, &i); err != nil || i != of[publisher] {
				t.Fatalf("event %q comes when the next of its publisher is %d (%v)", event.GetContainerId(), of[publisher], err)
			}
			of[publisher]++
		}
	}
}

// Property 32: a stalled consumer stalls no other, and sees that it missed events.
func TestConsumerThatDoesNotReadLosesItsStream(t *testing.T) {
	b := NewBroadcaster()
	stalled, reading := subscribed(t, b), subscribed(t, b)
	for i := range maxQueuedEvents + 10 {
		id := fmt.Sprint(i)
		b.Publish(id, created, nothing)
		got := next(t, reading).GetContainerId()
		harness.Need(t, got == id, "who reads got %s, not %s", got, id)
	}
	for i := range maxQueuedEvents {
		got := next(t, stalled).GetContainerId()
		harness.Need(t, got == fmt.Sprint(i), "who did not read got %s, not %d", got, i)
	}
	for range 2 {
		event, err := stalled.Next(t.Context())
		harness.Want(t, errors.Is(err, ErrOverflow) && errdefs.IsResourceExhausted(err), "after the gap come %v and %v", event, err)
	}
	stalled.Cancel()
}

func TestCloseEndsSubscriptions(t *testing.T) {
	b := NewBroadcaster()
	b.Publish("nobody", created, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
		t.Error("a pod was looked at without a subscriber")
		return nil, nil
	})
	before, cancelled := subscribed(t, b), subscribed(t, b)
	cancelled.Cancel()
	_, err := cancelled.Next(t.Context())
	harness.Want(t, errors.Is(err, context.Canceled), "a subscription that was cancelled says %v", err)
	b.Publish("last", created, nothing)
	b.Close()
	b.Close()
	harness.Same(t, "the last event", next(t, before).GetContainerId(), "last")
	_, err = before.Next(t.Context())
	harness.Want(t, errdefs.IsUnavailable(err), "after the end comes %v", err)
	before.Cancel()
	_, err = b.Subscribe()
	harness.Want(t, errdefs.IsUnavailable(err), "a subscription after the end: %v", err)
}

func TestTimesGoOnWhenTheClockJumpsBack(t *testing.T) {
	b := NewBroadcaster()
	s := subscribed(t, b)
	b.Publish("before", created, nothing)
	first := next(t, s)
	b.last = first.GetCreatedAt() + int64(1e12) // what a clock that was ahead left
	b.Publish("after", created, nothing)
	harness.Same(t, "the event has the time", next(t, s).GetCreatedAt(), first.GetCreatedAt()+int64(1e12)+1)
	harness.Same(t, "a status then", b.Time(), b.last)
}

// The number of consumers is bounded, and one that has left makes room.
func TestSubscriptionsAreBounded(t *testing.T) {
	b := NewBroadcaster()
	var last *Subscription
	for range maxSubscriptions {
		last = subscribed(t, b)
	}
	_, err := b.Subscribe()
	harness.Want(t, errdefs.IsResourceExhausted(err), "one more than %d: %v", maxSubscriptions, err)
	last.Cancel()
	subscribed(t, b)
}

// What a consumer may hold is bounded in bytes too: events of pods with large annotations end a consumer that does
// not read long before their number does, and one that reads gets an event as large as they come.
func TestQueuedBytesAreBounded(t *testing.T) {
	b := NewBroadcaster()
	stalled, reading := subscribed(t, b), subscribed(t, b)
	publish := func(size int) {
		b.Publish("large", created, func() (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
			return &runtimeapi.PodSandboxStatus{Annotations: map[string]string{"note": strings.Repeat("x", size)}}, nil
		})
		next(t, reading)
	}
	publish(maxAnswer - 1<<10)
	publish(maxQueuedBytes - maxAnswer + 1<<10)
	next(t, stalled)
	harness.Want(t, stalled.bytes.Load() == 0, "an empty queue holds %d bytes", stalled.bytes.Load())
	_, err := stalled.Next(t.Context())
	harness.Want(t, errors.Is(err, ErrOverflow), "after more than %d bytes comes %v", maxQueuedBytes, err)
}
