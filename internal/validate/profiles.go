package validate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// errNoAppArmor: a profile was asked for by name on a machine without AppArmor.
var errNoAppArmor = errors.New("this machine has no AppArmor")

// checkAppArmor reports why an AppArmor profile cannot be used.
func checkAppArmor(profile *runtimeapi.SecurityProfile, m machine.Machine) error {
	if profile.GetProfileType() != runtimeapi.SecurityProfile_Localhost {
		return nil
	}
	if !m.AppArmor {
		return fmt.Errorf("profile %q: %w", profile.GetLocalhostRef(), errNoAppArmor)
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

// checkSeccomp reports why a seccomp profile cannot be used.
func checkSeccomp(profile *runtimeapi.SecurityProfile) error {
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
