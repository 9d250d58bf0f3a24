package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxNamespaces(t *testing.T) {
	golden(t, "namespaces", sandboxNamespaces, func(s *specs.Spec) any {
		return struct {
			Hostname    string                 `json:"hostname,omitempty"`
			Namespaces  []specs.LinuxNamespace `json:"namespaces"`
			UIDMappings []specs.LinuxIDMapping `json:"uidMappings,omitempty"`
			GIDMappings []specs.LinuxIDMapping `json:"gidMappings,omitempty"`
		}{s.Hostname, s.Linux.Namespaces, s.Linux.UIDMappings, s.Linux.GIDMappings}
	})
}
