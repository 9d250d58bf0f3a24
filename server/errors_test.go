package server

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
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

// The code says the kind of an error, so its text does not say it again.
func TestErrorTextsDoNotRepeatTheirKind(t *testing.T) {
	err := fmt.Errorf("start container 4e5f: %w", fmt.Errorf("no such program: %w: %w", errdefs.ErrFailedPrecondition, errdefs.ErrFailedPrecondition))
	if got := status.Convert(grpcError(err)); got.Code() != codes.FailedPrecondition || got.Message() != "start container 4e5f: no such program" {
		t.Errorf("the error is %v: %q", got.Code(), got.Message())
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
