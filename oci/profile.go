package oci

import (
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// parseProfile reads the older form of a security profile: runtime/default,
// docker/default, unconfined, or localhost/ and a path or a name.
func parseProfile(text string) *runtimeapi.SecurityProfile {
	profile := &runtimeapi.SecurityProfile{}
	ref, isLocal := strings.CutPrefix(text, "localhost/")
	switch {
	case text == "":
		return nil
	case isLocal:
		profile.ProfileType = runtimeapi.SecurityProfile_Localhost
		profile.LocalhostRef = ref
	case text == "unconfined":
		profile.ProfileType = runtimeapi.SecurityProfile_Unconfined
	default:
		profile.ProfileType = runtimeapi.SecurityProfile_RuntimeDefault
	}
	return profile
}
