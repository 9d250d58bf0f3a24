package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxAppArmor(t *testing.T) {
	golden(t, "apparmor", sandboxAppArmor, func(s *specs.Spec) any { return s.Process.ApparmorProfile })
}
