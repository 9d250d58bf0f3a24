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

// Of is the text of an error without the errdefs kinds at its end: its caller gets the kind as a code. The words "not
// found", "already exists" and "permission denied" stay once, because people see the text alone, in an event of a pod.
// Of removes one "invalid argument": a second is the kernel's word for EINVAL.
func Of(err error) string {
	text := strings.TrimRight(err.Error(), " \n")
	left := slices.DeleteFunc(slices.Clone(kinds), func(kind error) bool { return !errors.Is(err, kind) })
	said := ""
	for {
		i := slices.IndexFunc(left, func(kind error) bool { return strings.HasSuffix(text, ": "+kind.Error()) })
		if i < 0 {
			break
		}
		kind := left[i]
		text = strings.TrimRight(strings.TrimSuffix(text, ": "+kind.Error()), " \n")
		switch kind {
		case errdefs.ErrInvalidArgument:
			left = slices.Delete(left, i, i+1)
		case errdefs.ErrNotFound, errdefs.ErrAlreadyExists, errdefs.ErrPermissionDenied:
			said = kind.Error()
		}
	}
	if said != "" && !strings.Contains(strings.ToLower(text), said) {
		text += ": " + said
	}
	return text
}
