package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxUser(t *testing.T) {
	golden(t, "user", sandboxUser, func(s *specs.Spec) any { return s.Process.User })
}
