//go:build vm

package container

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func appArmor(kind runtimeapi.SecurityProfile_ProfileType, name string) option {
	return secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: name}
	})
}

// confinement is what the kernel says of a process.
func confinement(t *testing.T, pid int) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/attr/apparmor/current", pid))
	check(t, err)
	return strings.TrimRight(string(data), "\n\x00")
}

// cri: LinuxContainerSecurityContext.apparmor
func TestAppArmor(t *testing.T) {
	p := newPod(t, func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	})
	const confined = "minicri-default (enforce)"
	same(t, "pause", confinement(t, p.pausePID()), confined)
	loadTestProfile(t)
	for name, c := range map[string]struct {
		option option
		want   string
	}{
		"unnamed":    {func(*runtimeapi.ContainerConfig) {}, confined},
		"default":    {appArmor(runtimeapi.SecurityProfile_RuntimeDefault, ""), confined},
		"unconfined": {appArmor(runtimeapi.SecurityProfile_Unconfined, ""), "unconfined"},
		"localhost":  {appArmor(runtimeapi.SecurityProfile_Localhost, testProfile), testProfile + " (enforce)"},
		"prefixed":   {appArmor(runtimeapi.SecurityProfile_Localhost, "localhost/"+testProfile), testProfile + " (enforce)"},
	} {
		id := p.run(name, forever, c.option)
		same(t, name, confinement(t, p.info(id).PID), c.want)
		same(t, "an exec in "+name, p.exec(id, "cat /proc/self/attr/apparmor/current"), c.want)
		check(t, p.stop(id, 10))
	}
	if _, err := p.tryCreate(shell("unknown", "true", appArmor(runtimeapi.SecurityProfile_Localhost, "no-such-profile"))); err == nil {
		t.Error("a profile that is not loaded was accepted")
	} else {
		wantCode(t, err, codes.InvalidArgument)
	}
}

// The profile forbids what the capabilities would allow.
func TestAppArmorConfines(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	}))
	p.exec(id, "! mount -t tmpfs x /tmp 2>/dev/null")
	free := p.run("free", forever, appArmor(runtimeapi.SecurityProfile_Unconfined, ""), secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	}))
	p.exec(free, "mount -t tmpfs x /tmp")
}

const testProfile = "minicri-test-profile"

func loadTestProfile(t *testing.T) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "profile")
	check(t, os.WriteFile(path, []byte("profile "+testProfile+" flags=(attach_disconnected) {\n  file,\n  capability,\n  network,\n  signal,\n  ptrace,\n}\n"), 0o600))
	parse := func(action string) {
		if output, err := exec.Command("apparmor_parser", action, path).CombinedOutput(); err != nil {
			t.Errorf("apparmor_parser %s: %v: %s", action, err, output)
		}
	}
	parse("-Kr")
	t.Cleanup(func() { parse("-KR") })
}
