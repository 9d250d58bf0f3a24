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
		harness.WantCode(t, err, codes.Internal)
		stream, err := client.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		harness.WantCode(t, err, codes.Internal)
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
	harness.Want(t, failed.Code() == codes.NotFound && len(failed.Details()) == 1 &&
		failed.Details()[0].(*errdetails.ErrorInfo).GetMetadata()["step"] == "container/check", "%v", failed)
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
	harness.Want(t, version.GetVersion() == "0.1.0" && version.GetRuntimeName() == "minicri" && version.GetRuntimeVersion() == "1.2.3" &&
		version.GetRuntimeApiVersion() == "v1", "version %v", version)
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
	harness.Want(t, err == nil && info["quarantinedRecords"] == `{"items":[]}` && info["version"] == `"1"`, "%v, %v", info, err)
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
