package errtext

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestOf(t *testing.T) {
	const failed = "start: no such program"
	kernel := &fs.PathError{Op: "write", Path: "cpu.shares", Err: unix.EINVAL}
	for _, test := range []struct {
		err  error
		want string
	}{
		{errors.New(failed), failed},
		{fmt.Errorf(failed+": %w", errdefs.ErrFailedPrecondition), failed},
		{fmt.Errorf(failed+": %w: %w", errdefs.ErrFailedPrecondition, errdefs.ErrFailedPrecondition), failed},
		{fmt.Errorf(failed+"\n: %w", errdefs.ErrFailedPrecondition), failed},
		{fmt.Errorf("%w: %s", errdefs.ErrInvalidArgument, "config: is missing"), "invalid argument: config: is missing"},
		{errdefs.ErrNotFound, "not found"},
		// Words that people need, once.
		{fmt.Errorf("image %q: %w", "a", errdefs.ErrNotFound), `image "a": not found`},
		{fmt.Errorf("image %q: %w: %w", "a", errdefs.ErrNotFound, errdefs.ErrUnavailable), `image "a": not found`},
		{fmt.Errorf("GET /v2/a: 404 Not Found: %w", errdefs.ErrNotFound), "GET /v2/a: 404 Not Found"},
		{fmt.Errorf("pod a: %w", errdefs.ErrAlreadyExists), "pod a: already exists"},
		{fmt.Errorf("exec: %w: %w", unix.EACCES, errdefs.ErrPermissionDenied), "exec: permission denied"},
		{fmt.Errorf("registry: %w", errdefs.ErrUnauthenticated), "registry"},
		{errors.New("it is said: not found"), "it is said: not found"},
		{fmt.Errorf("pull app:v1: %w", errdefs.ErrNotFound), "pull app:v1: not found"},
		{fmt.Errorf("exec: not found in $PATH: %w", errdefs.ErrNotFound), "exec: not found in $PATH"},
		// The kernel has the same words for its own.
		{kernel, "write cpu.shares: invalid argument"},
		{fmt.Errorf("%w: %w", kernel, errdefs.ErrInvalidArgument), "write cpu.shares: invalid argument"},
		{fmt.Errorf("exec: %w: %w", unix.EACCES, errdefs.ErrFailedPrecondition), "exec: permission denied"},
		// What came from another program.
		{errgrpc.ToNative(status.Error(codes.Unknown, "exec: permission denied")), "exec: permission denied"},
		{errgrpc.ToNative(status.Error(codes.FailedPrecondition, failed+": failed precondition")), failed},
		{fmt.Errorf("%w: %w", errgrpc.ToNative(status.Error(codes.FailedPrecondition, failed+": failed precondition")), errdefs.ErrFailedPrecondition), failed},
		{errors.Join(fmt.Errorf("one: %w", errdefs.ErrNotFound), fmt.Errorf("two: %w", errdefs.ErrUnavailable)), "one: not found\ntwo"},
		{errors.New(""), ""},
	} {
		if got := Of(test.err); got != test.want {
			t.Errorf("%q became %q, want %q", test.err, got, test.want)
		}
	}
}
