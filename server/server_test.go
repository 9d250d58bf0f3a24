package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
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
			if status.Code(got) != test.code {
				t.Errorf("%v has code %v, want %v", err, status.Code(got), test.code)
			}
			if s, ok := status.FromError(got); !ok || s.Message() == "" {
				t.Errorf("%v became %v, which is no gRPC error", err, got)
			}
		}
	}
	if err := grpcError(nil); err != nil {
		t.Errorf("no error became %v", err)
	}
}

// A panic is an error of its call alone.
func TestAPanicIsAnErrorOfItsCall(t *testing.T) {
	client := dial(t, &Runtime{}) // everything that needs a sandbox panics
	for range 2 {
		_, err := client.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
		wantCode(t, err, codes.Internal)
		stream, err := client.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		wantCode(t, err, codes.Internal)
		if _, err := client.Version(t.Context(), &runtimeapi.VersionRequest{}); err != nil {
			t.Errorf("the next call: %v", err)
		}
	}
}

// What the message says for people the details say for programs.
func TestErrorsHaveFields(t *testing.T) {
	plugin := &network.PluginError{Network: "net", Plugin: step.Plugin{Name: "host-local", Verb: "ADD", Code: 11, Message: "no address", Stderr: "last words"}, Advice: "remove pods"}
	err := grpcError(fmt.Errorf("run sandbox x: %w", &step.Error{Step: "pod/cni add", Err: fmt.Errorf("CNI ADD: %w", plugin)}))
	answer := status.Convert(err)
	if want := "run sandbox x: cni add: CNI ADD: plugin host-local: no address (CNI error code 11): remove pods"; answer.Message() != want || answer.Code() != codes.Unknown {
		t.Errorf("%v %q", answer.Code(), answer.Message())
	}
	if len(answer.Details()) != 2 {
		t.Fatalf("details %v", answer.Details())
	}
	info := answer.Details()[0].(*errdetails.ErrorInfo)
	for key, want := range map[string]string{
		"step": "pod/cni add", "network": "net", "plugin": "host-local", "verb": "ADD", "cni_code": "11", "cni_message": "no address", "advice": "remove pods",
	} {
		if got := info.GetMetadata()[key]; got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	if info.GetDomain() != "minicri" || info.GetReason() != "CNI_PLUGIN_FAILED" {
		t.Errorf("%v", info)
	}
	if debug := answer.Details()[1].(*errdetails.DebugInfo); debug.GetDetail() != "last words" {
		t.Errorf("%v", debug)
	}
}

// A step that failed without a plugin is named; an error of no step has no fields.
func TestErrorsOfStepsAndOfNone(t *testing.T) {
	failed := status.Convert(grpcError(&step.Error{Step: "container/check", Err: errdefs.ErrNotFound}))
	if failed.Code() != codes.NotFound || len(failed.Details()) != 1 || failed.Details()[0].(*errdetails.ErrorInfo).GetMetadata()["step"] != "container/check" {
		t.Errorf("%v", failed)
	}
	if none := status.Convert(grpcError(errdefs.ErrNotFound)); len(none.Details()) != 0 {
		t.Errorf("%v", none.Details())
	}
	if pull := status.Convert(grpcError(fmt.Errorf("pull x: %w", image.ErrRegistryUnavailable))); pull.Code() != codes.Unknown || len(pull.Message()) < 40 {
		t.Errorf("%v", pull)
	}
}

// Every call that the daemon serves either changes nothing, which its name says,
// or is waited for at a shutdown.
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
			if reads == slices.Contains(changing, name) {
				t.Errorf("%s: is in the list of calls that change something: %v", name, !reads)
			}
		}
	}
	if served < 40 {
		t.Errorf("%d calls are served", served)
	}
}

// A timeout of any int64 is one: it never overflows into no time at all.
func TestSeconds(t *testing.T) {
	longest := time.Duration(math.MaxInt64).Truncate(time.Second)
	for n, want := range map[int64]time.Duration{
		math.MinInt64: 0, -1: 0, 0: 0, 30: 30 * time.Second, 10_000_000_000: longest, math.MaxInt64: longest,
	} {
		if got := seconds(n); got != want {
			t.Errorf("%d seconds are %v, want %v", n, got, want)
		}
	}
}
