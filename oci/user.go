package oci

import "github.com/opencontainers/runtime-spec/specs-go"

// sandboxUser runs pause as the user that the pod asks for. Pause has no
// /etc/group to look into, so only the groups that are listed count, whatever
// supplemental_groups_policy says.
func sandboxUser(s *Sandbox, spec *specs.Spec) error {
	security := s.security()
	spec.Process.User.UID = uint32(security.GetRunAsUser().GetValue())
	spec.Process.User.GID = uint32(security.GetRunAsGroup().GetValue())
	for _, group := range security.GetSupplementalGroups() {
		spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
	}
	return nil
}
