package oci

import (
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cri: LinuxSandboxSecurityContext.selinux_options
func TestSandboxSELinux(t *testing.T) {
	golden(t, "selinux", sandboxSELinux, func(s *specs.Spec) any {
		return map[string]string{"process": s.Process.SelinuxLabel, "mount": s.Linux.MountLabel}
	})
}

// cri: SELinuxOption.level SELinuxOption.role SELinuxOption.type SELinuxOption.user
func TestSELinuxOptions(t *testing.T) {
	for _, test := range []struct {
		options *runtimeapi.SELinuxOption
		want    []string
	}{
		{nil, nil},
		{&runtimeapi.SELinuxOption{}, nil},
		{&runtimeapi.SELinuxOption{Level: "s0:c1,c2"}, []string{"level:s0:c1,c2"}},
		{
			&runtimeapi.SELinuxOption{User: "u", Role: "r", Type: "t", Level: "s0"},
			[]string{"user:u", "role:r", "type:t", "level:s0"},
		},
	} {
		if got := selinuxOptions(test.options); !slices.Equal(got, test.want) {
			t.Errorf("selinuxOptions(%v) = %q, want %q", test.options, got, test.want)
		}
	}
}

func TestLevelOf(t *testing.T) {
	for label, want := range map[string]string{
		"":                                   "",
		"system_u:system_r:container_t":      "",
		"system_u:system_r:container_t:s0":   "s0",
		"system_u:system_r:spc_t:s0:c10,c20": "s0:c10,c20",
	} {
		if got := levelOf(label); got != want {
			t.Errorf("levelOf(%q) = %q, want %q", label, got, want)
		}
	}
}
