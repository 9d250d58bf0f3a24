package main

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A program that reads the list of a node without pods gets a list.
func TestNoTimelinesAreAnEmptyList(t *testing.T) {
	var output strings.Builder
	if err := (timelineFlags{asJSON: true}).show(t.Context(), &output, "", nil); err != nil || output.String() != "[]\n" {
		t.Errorf("%q, %v; want []", output.String(), err)
	}
}

// The daemon leaves out of a message what its code says.
func TestErrorsOfImagesSayTheirKind(t *testing.T) {
	for _, c := range []struct {
		code       codes.Code
		text, want string
	}{
		{codes.NotFound, `image "none"`, `image "none": not found`},
		{codes.NotFound, `image "none": not found`, `image "none": not found`},
		{codes.InvalidArgument, "invalid reference", "invalid reference"},
	} {
		if err := withoutCode(status.Error(c.code, c.text)); err.Error() != c.want {
			t.Errorf("%v %q: %q, want %q", c.code, c.text, err, c.want)
		}
	}
	if withoutCode(nil) != nil {
		t.Error("no error became one")
	}
}
