package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxProcess(t *testing.T) {
	golden(t, "process", sandboxProcess, func(s *specs.Spec) any { return s.Process })
}
