package oci

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSandboxProcess(t *testing.T) {
	golden(t, "process", sandboxProcess, func(s *specs.Spec) any { return s.Process })
}

func TestOOMScoreAdjNear(t *testing.T) {
	for _, test := range []struct {
		name         string
		machine      Machine
		wanted, near int
	}{
		{"root of a plain machine", Machine{CanLowerOOMAdj: true}, -998, -998},
		{"root of a machine whose daemon is protected", Machine{OOMScoreAdj: -999, CanLowerOOMAdj: true}, -998, -998},
		{"no CAP_SYS_RESOURCE", Machine{OOMScoreAdj: 0}, -998, 0},
		{"no CAP_SYS_RESOURCE, a daemon that is itself high", Machine{OOMScoreAdj: 200}, -998, 200},
		{"no CAP_SYS_RESOURCE, a daemon that was protected by its parent", Machine{OOMScoreAdj: -999}, -998, -998},
		{"a higher value needs no capability", Machine{OOMScoreAdj: 0}, 1000, 1000},
	} {
		if near := test.machine.OOMScoreAdjNear(test.wanted); near != test.near {
			t.Errorf("%s: %d becomes %d, want %d", test.name, test.wanted, near, test.near)
		}
	}
}
