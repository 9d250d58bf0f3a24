package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxMounts(t *testing.T) {
	golden(t, "mounts", sandboxMounts, func(s *specs.Spec) any { return s.Mounts })
}
