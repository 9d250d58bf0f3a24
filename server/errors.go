package server

import (
	"context"
	"errors"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// grpcError gives an error of the domain its gRPC code. This is the only such
// table; an error that already has a code keeps it.
func grpcError(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Error(codeOf(err), err.Error())
}

func codeOf(err error) codes.Code {
	for _, row := range []struct {
		is   func(error) bool
		code codes.Code
	}{
		{errdefs.IsInvalidArgument, codes.InvalidArgument},
		{errdefs.IsNotFound, codes.NotFound},
		{errdefs.IsAlreadyExists, codes.AlreadyExists},
		{errdefs.IsFailedPrecondition, codes.FailedPrecondition},
		{errdefs.IsNotImplemented, codes.Unimplemented},
		{errdefs.IsUnauthorized, codes.Unauthenticated},
		{errdefs.IsPermissionDenied, codes.PermissionDenied},
		{errdefs.IsResourceExhausted, codes.ResourceExhausted},
		{func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }, codes.DeadlineExceeded},
		{func(err error) bool { return errors.Is(err, context.Canceled) }, codes.Canceled},
		{errdefs.IsUnavailable, codes.Unavailable},
	} {
		if row.is(err) {
			return row.code
		}
	}
	return codes.Unknown
}
