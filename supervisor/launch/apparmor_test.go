package launch_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// The program of an exec is executed under its AppArmor profile, as by libcontainer's
// init, and one that is not loaded is an error.
func TestExecUnderAppArmor(t *testing.T) {
	if !strings.HasPrefix(read("/sys/module/apparmor/parameters/enabled"), "Y") {
		t.Skip("no AppArmor")
	}
	const profile = "minicri-launch-test"
	rules := "profile " + profile + " flags=(attach_disconnected) {\n file,\n signal,\n ptrace,\n unix,\n deny /etc/shadow r,\n}\n"
	if out, status := command(t, "sh", "-c", "echo '"+rules+"' | apparmor_parser -r"); status != 0 {
		t.Fatalf("%d: %s", status, out)
	}
	defer command(t, "sh", "-c", "echo '"+rules+"' | apparmor_parser -R")
	for name, nnp := range map[string]bool{"no new privileges": true, "privileges that it may get": false} {
		t.Run(name, func(t *testing.T) {
			_, c := execNode(t, func(s *specs.Spec) { s.Linux.Seccomp = defaultProfile(t, s) })
			p := execProcess()
			p.ApparmorProfile, p.NoNewPrivileges = profile, nnp
			want, got := c.lookInit(t, p), c.lookExec(t, p)
			if !strings.HasPrefix(got["attr/current"], profile+" (enforce)") {
				t.Errorf("it is confined by %q", got["attr/current"])
			}
			compare(t, got, want)
			p.ApparmorProfile = "not-there"
			if _, err := c.exec(t, t.Context(), p); !strings.Contains(fmt.Sprint(err), "set the AppArmor profile not-there: no such file or directory") {
				t.Errorf("a profile that is not loaded: %v", err)
			}
		})
	}
}
