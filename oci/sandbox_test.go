package oci

import (
	"bytes"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// The rules together. A seccomp profile by its name alone: see seccomp_test.go.
func TestForSandbox(t *testing.T) {
	goldenSpecs(t, "sandbox", func(s *specs.Spec) any { return s }, ForSandbox)
}

func TestTheSameInputGivesTheSameSpec(t *testing.T) {
	for _, c := range readGolden[goldenCase](t, "testdata/sandbox.json") {
		first, firstErr := ForSandbox(sandboxOf(t, c))
		for range 20 {
			again, err := ForSandbox(sandboxOf(t, c))
			if (err == nil) != (firstErr == nil) || !bytes.Equal(compact(t, first), compact(t, again)) {
				t.Fatalf("case %q: another spec: %s", c.Case, compact(t, again))
			}
		}
	}
}
