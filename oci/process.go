package oci

import "github.com/opencontainers/runtime-spec/specs-go"

// pauseOOMScoreAdj makes the pause process one of the last to be killed: with
// it the whole pod would have to be made again.
const pauseOOMScoreAdj = -998

func sandboxProcess(s *Sandbox, spec *specs.Spec) error {
	adjust := s.Machine.OOMScoreAdjNear(pauseOOMScoreAdj)
	spec.Process.Args = []string{PauseProgram}
	spec.Process.Cwd = "/"
	spec.Process.NoNewPrivileges = true
	spec.Process.Capabilities = &specs.LinuxCapabilities{}
	spec.Process.OOMScoreAdj = &adjust
	return nil
}

// OOMScoreAdjNear is the value nearest to the wanted one that a process of
// this machine may have.
func (m Machine) OOMScoreAdjNear(wanted int) int {
	if m.CanLowerOOMAdj {
		return wanted
	}
	return max(wanted, m.OOMScoreAdj)
}
