package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxResources(t *testing.T) {
	golden(t, "resources", sandboxResources, func(s *specs.Spec) any { return s.Linux.Resources })
}

func TestCgroupsPath(t *testing.T) {
	for _, test := range []struct {
		parent  string
		systemd bool
		want    string
	}{
		{"/kubepods/burstable/pod1", false, "/kubepods/burstable/pod1/m-1f-abc"},
		{"kubepods", false, "/kubepods/m-1f-abc"},
		{"", false, "/m-1f-abc"},
		{"/a//b/./", false, "/a/b/m-1f-abc"},
		{"kubepods-pod1.slice", true, "kubepods-pod1.slice:m-1f:abc"},
		// The kubelet sends the whole path of the slice.
		{"/kubepods.slice/kubepods-pod1.slice", true, "kubepods-pod1.slice:m-1f:abc"},
		{"/kubepods.slice/", true, "kubepods.slice:m-1f:abc"},
	} {
		if got := CgroupsPath(test.parent, "m-1f-", "abc", test.systemd); got != test.want {
			t.Errorf("CgroupsPath(%q, systemd %v) = %q, want %q", test.parent, test.systemd, got, test.want)
		}
	}
}
