package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func sandboxSeccomp(s *Sandbox, spec *specs.Spec) error {
	if s.security().GetPrivileged() {
		return nil
	}
	profile, err := seccompProfile(SeccompOf(s.security()), spec)
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	spec.Linux.Seccomp = profile
	return nil
}

// SeccompOf is the profile that a sandbox asks for. The older form as a string
// counts only where the newer one is missing (CRI, seccomp_profile_path).
func SeccompOf(security *runtimeapi.LinuxSandboxSecurityContext) *runtimeapi.SecurityProfile {
	if profile := security.GetSeccomp(); profile != nil {
		return profile
	}
	return parseProfile(security.GetSeccompProfilePath())
}

func seccompProfile(profile *runtimeapi.SecurityProfile, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	switch profile.GetProfileType() {
	case runtimeapi.SecurityProfile_Unconfined:
		return nil, nil
	case runtimeapi.SecurityProfile_Localhost:
		body, err := os.ReadFile(profile.GetLocalhostRef())
		if err != nil {
			return nil, err
		}
		return seccomp.LoadProfile(string(body), spec)
	default:
		if profile == nil {
			return nil, nil
		}
		return seccomp.GetDefaultProfile(spec)
	}
}

// CheckSeccomp tells why a seccomp profile cannot be used.
func CheckSeccomp(profile *runtimeapi.SecurityProfile) error {
	if profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost {
		return nil
	}
	ref := profile.GetLocalhostRef()
	if !filepath.IsAbs(ref) {
		return fmt.Errorf("localhost_ref %q is not an absolute path", ref)
	}
	if info, err := os.Stat(ref); err != nil {
		return err
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a file", ref)
	}
	return nil
}

// ErrNoAppArmor: a profile was asked for by name on a machine without AppArmor.
var ErrNoAppArmor = errors.New("this machine has no AppArmor")
