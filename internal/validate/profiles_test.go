package validate

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

func TestCheckAppArmor(t *testing.T) {
	without := machine.Machine{}
	for _, kind := range []runtimeapi.SecurityProfile_ProfileType{
		runtimeapi.SecurityProfile_RuntimeDefault, runtimeapi.SecurityProfile_Unconfined,
	} {
		if err := checkAppArmor(&runtimeapi.SecurityProfile{ProfileType: kind}, without); err != nil {
			t.Errorf("%v without AppArmor has to degrade: %v", kind, err)
		}
	}
	if err := checkAppArmor(nil, without); err != nil {
		t.Errorf("no profile at all: %v", err)
	}
	byName := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "localhost/web"}
	if err := checkAppArmor(byName, without); !errors.Is(err, errNoAppArmor) {
		t.Errorf("a profile by name without AppArmor: %v, want errNoAppArmor", err)
	}
	if err := checkAppArmor(byName, machine.Machine{AppArmor: true}); err == nil || errors.Is(err, errNoAppArmor) {
		t.Errorf("a profile that is not loaded: %v, want an error that says so", err)
	}
}

func TestCheckSeccomp(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "profile.json")
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	const localhost = runtimeapi.SecurityProfile_Localhost
	for _, test := range []struct {
		profile *runtimeapi.SecurityProfile
		says    string
	}{
		{nil, ""},
		{&runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}, ""},
		{&runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined, LocalhostRef: "ignored"}, ""},
		{&runtimeapi.SecurityProfile{ProfileType: localhost, LocalhostRef: file}, ""},
		{&runtimeapi.SecurityProfile{ProfileType: localhost}, "not an absolute path"},
		{&runtimeapi.SecurityProfile{ProfileType: localhost, LocalhostRef: "profile.json"}, "not an absolute path"},
		{&runtimeapi.SecurityProfile{ProfileType: localhost, LocalhostRef: dir}, "not a file"},
		{&runtimeapi.SecurityProfile{ProfileType: localhost, LocalhostRef: file + ".missing"}, "no such file"},
		{&runtimeapi.SecurityProfile{ProfileType: localhost, LocalhostRef: "/a\x00b"}, "invalid argument"},
	} {
		err := checkSeccomp(test.profile)
		switch {
		case test.says == "" && err != nil:
			t.Errorf("checkSeccomp(%v): %v", test.profile, err)
		case test.says != "" && (err == nil || !strings.Contains(err.Error(), test.says)):
			t.Errorf("checkSeccomp(%v) = %v, want an error that says %q", test.profile, err, test.says)
		}
	}
}
