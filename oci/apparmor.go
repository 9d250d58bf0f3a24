package oci

import (
	"fmt"
	"os"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/apparmor"
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
// AppArmor; a profile asked for by name was refused by CheckAppArmor there.
func appArmorProfile(profile *runtimeapi.SecurityProfile, machine Machine) string {
	if profile == nil || !machine.AppArmor {
		return ""
	}
	switch profile.GetProfileType() {
	case runtimeapi.SecurityProfile_Localhost:
		return strings.TrimPrefix(profile.GetLocalhostRef(), "localhost/")
	case runtimeapi.SecurityProfile_Unconfined:
		return "unconfined"
	default:
		return apparmor.Profile
	}
}

// CheckAppArmor tells why an AppArmor profile cannot be used.
func CheckAppArmor(profile *runtimeapi.SecurityProfile, machine Machine) error {
	if profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost {
		return nil
	}
	if !machine.AppArmor {
		return fmt.Errorf("profile %q: %w", profile.GetLocalhostRef(), ErrNoAppArmor)
	}
	return checkLoaded(strings.TrimPrefix(profile.GetLocalhostRef(), "localhost/"))
}

func checkLoaded(name string) error {
	loaded, err := os.ReadFile("/sys/kernel/security/apparmor/profiles")
	if err != nil {
		return fmt.Errorf("list the loaded AppArmor profiles: %w", err)
	}
	for line := range strings.Lines(string(loaded)) {
		if strings.HasPrefix(line, name+" (") {
			return nil
		}
	}
	return fmt.Errorf("AppArmor profile %q is not loaded: load it with apparmor_parser", name)
}
