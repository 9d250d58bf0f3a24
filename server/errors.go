package server

import (
	"context"
	"errors"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/errtext"
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
	if name := kubeletName(err); name != "" {
		return withDetails(codes.Unknown, name+": "+errtext.Of(err)+advice(err), err)
	}
	return withDetails(codeOf(err), errtext.Of(err), err)
}

// kubeletName is the text by which the kubelet recognizes an error and shows it as a
// pod's reason. It looks for it at the beginning of the message, and only in
// errors of the code Unknown (pkg/kubelet/cri/remote, pkg/kubelet/images).
func kubeletName(err error) string {
	switch {
	case errors.Is(err, image.ErrVerification):
		return crierrors.ErrSignatureValidationFailed.Error()
	case errors.Is(err, image.ErrRegistryUnavailable):
		return crierrors.ErrRegistryUnavailable.Error()
	case errors.Is(err, container.ErrImageVolume):
		return crierrors.ErrImageVolumeMountFailed.Error()
	}
	return ""
}

// advice says what to do about an error whose cause is not this node.
func advice(err error) string {
	if errors.Is(err, image.ErrRegistryUnavailable) {
		return "; see whether the registry answers from this node, or name a mirror of it in hosts.toml (images.certs_dirs)"
	}
	return ""
}

func codeOf(err error) codes.Code {
	for _, row := range []struct {
		is   func(error) bool
		code codes.Code
	}{
		{errdefs.IsInvalidArgument, codes.InvalidArgument},
		{errdefs.IsDataLoss, codes.DataLoss}, // containerd's content store adds "failed precondition" to it
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
