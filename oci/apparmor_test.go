package oci

import (
	"errors"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestSandboxAppArmor(t *testing.T) {
	golden(t, "apparmor", sandboxAppArmor, func(s *specs.Spec) any { return s.Process.ApparmorProfile })
}

func TestCheckAppArmor(t *testing.T) {
	without := Machine{}
	for _, kind := range []runtimeapi.SecurityProfile_ProfileType{
		runtimeapi.SecurityProfile_RuntimeDefault, runtimeapi.SecurityProfile_Unconfined,
	} {
		if err := CheckAppArmor(&runtimeapi.SecurityProfile{ProfileType: kind}, without); err != nil {
			t.Errorf("%v without AppArmor has to degrade: %v", kind, err)
		}
	}
	if err := CheckAppArmor(nil, without); err != nil {
		t.Errorf("no profile at all: %v", err)
	}
	byName := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "localhost/web"}
	if err := CheckAppArmor(byName, without); !errors.Is(err, ErrNoAppArmor) {
		t.Errorf("a profile by name without AppArmor: %v, want ErrNoAppArmor", err)
	}
	if err := CheckAppArmor(byName, Machine{AppArmor: true}); err == nil || errors.Is(err, ErrNoAppArmor) {
		t.Errorf("a profile that nobody loaded: %v, want an error that says so", err)
	}
}
