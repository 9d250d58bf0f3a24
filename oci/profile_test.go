package oci

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestParseProfile(t *testing.T) {
	if profile := parseProfile(""); profile != nil {
		t.Errorf("no text gives %v", profile)
	}
	for _, test := range []struct {
		text string
		kind runtimeapi.SecurityProfile_ProfileType
		ref  string
	}{
		{"runtime/default", runtimeapi.SecurityProfile_RuntimeDefault, ""},
		{"docker/default", runtimeapi.SecurityProfile_RuntimeDefault, ""},
		{"unconfined", runtimeapi.SecurityProfile_Unconfined, ""},
		{"localhost//etc/p.json", runtimeapi.SecurityProfile_Localhost, "/etc/p.json"},
		{"localhost/web", runtimeapi.SecurityProfile_Localhost, "web"},
	} {
		profile := parseProfile(test.text)
		if profile.GetProfileType() != test.kind || profile.GetLocalhostRef() != test.ref {
			t.Errorf("parseProfile(%q) = %v, want %v %q", test.text, profile, test.kind, test.ref)
		}
	}
}
