// Package errtext makes the text of an error for callers that get its kind apart
// from it: as the code of an answer, or as the reason in a status. It keeps
// nothing, so it has no state and no lock.
package errtext

import (
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// Of is the text of an error without the kinds of errdefs that it was wrapped
// with at its end. Words of the kernel stay, although those of EINVAL and EACCES
// are the same ("invalid argument", "permission denied").
func Of(err error) string {
	text, kinds := strings.TrimRight(err.Error(), " \n"), kindsIn(err)
	for {
		i := strings.LastIndex(text, ": ")
		if i < 0 {
			return text
		}
		found := slices.IndexFunc(kinds, func(kind error) bool { return kind.Error() == text[i+len(": "):] })
		if found < 0 {
			return text
		}
		kinds = slices.Delete(kinds, found, found+1)
		text = strings.TrimRight(text[:i], " \n")
	}
}

// kindsIn are the kinds that an error was wrapped with, one for each time.
func kindsIn(err error) []error {
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return kindsIn(inner)
		}
	case interface{ Unwrap() []error }:
		var all []error
		for _, inner := range e.Unwrap() {
			all = append(all, kindsIn(inner)...)
		}
		return all
	}
	if slices.Contains(kinds(), err) {
		return []error{err}
	}
	return nil
}

func kinds() []error {
	return []error{
		errdefs.ErrInvalidArgument, errdefs.ErrNotFound, errdefs.ErrAlreadyExists, errdefs.ErrFailedPrecondition,
		errdefs.ErrNotImplemented, errdefs.ErrUnauthenticated, errdefs.ErrPermissionDenied, errdefs.ErrResourceExhausted,
		errdefs.ErrUnavailable, errdefs.ErrDataLoss,
	}
}
