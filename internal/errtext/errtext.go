// Package errtext makes the text of an error for callers that get its kind apart from it, as the code of an
// answer or the reason in a status. It keeps no state.
package errtext

import (
	"errors"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

var kinds = []error{
	errdefs.ErrInvalidArgument, errdefs.ErrNotFound, errdefs.ErrAlreadyExists, errdefs.ErrFailedPrecondition,
	errdefs.ErrNotImplemented, errdefs.ErrUnauthenticated, errdefs.ErrPermissionDenied, errdefs.ErrResourceExhausted,
	errdefs.ErrUnavailable, errdefs.ErrDataLoss,
}

// Of is the text of an error without the errdefs kinds at its end. It removes one "invalid argument" and "permission
// denied": a second is the kernel's word for EINVAL or EACCES. It keeps "not found" unless the rest says so: the kubelet
// shows the text without the code.
func Of(err error) string {
	text := strings.TrimRight(err.Error(), " \n")
	left := slices.DeleteFunc(slices.Clone(kinds), func(kind error) bool { return !errors.Is(err, kind) })
	for {
		i := slices.IndexFunc(left, func(kind error) bool { return strings.HasSuffix(text, ": "+kind.Error()) })
		if i < 0 {
			return text
		}
		rest := strings.TrimRight(strings.TrimSuffix(text, ": "+left[i].Error()), " \n")
		if left[i] == errdefs.ErrNotFound && !strings.Contains(rest, "not found") {
			return text
		}
		text = rest
		if left[i] == errdefs.ErrInvalidArgument || left[i] == errdefs.ErrPermissionDenied {
			left = slices.Delete(left, i, i+1)
		}
	}
}
