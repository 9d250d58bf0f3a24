package oci

import (
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

func sandboxAppArmor(s *Sandbox, spec *specs.Spec) error {
	if s.security().GetPrivileged() {
		return nil
	}
	spec.Process.ApparmorProfile = appArmorProfile(s.security().GetApparmor(), s.Machine)
	return nil
}

// containerAppArmor: a container that names no profile gets the default one.
func containerAppArmor(c *Container, spec *specs.Spec) error {
	if c.security().GetPrivileged() {
		return nil
	}
	profile := ContainerAppArmor(c.security())
	if profile == nil {
		profile = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	}
	spec.Process.ApparmorProfile = appArmorProfile(profile, c.Machine)
	return nil
}

// ContainerAppArmor is the profile that a container asks for; the older form
// counts only where the newer one is missing (CRI, apparmor_profile).
func ContainerAppArmor(security *runtimeapi.LinuxContainerSecurityContext) *runtimeapi.SecurityProfile {
	if profile := security.GetApparmor(); profile != nil {
		return profile
	}
	//lint:ignore SA1019 the older form is still sent
	return parseProfile(security.GetApparmorProfile())
}

// appArmorProfile: the default degrades to none where the machine has no
// AppArmor; a profile asked for by name was refused there before.
func appArmorProfile(profile *runtimeapi.SecurityProfile, m machine.Machine) string {
	if profile == nil || !m.AppArmor {
		return ""
	}
	switch profile.GetProfileType() {
	case runtimeapi.SecurityProfile_Localhost:
		return strings.TrimPrefix(profile.GetLocalhostRef(), "localhost/")
	case runtimeapi.SecurityProfile_Unconfined:
		return "unconfined"
	default:
		return machine.DefaultProfile
	}
}
