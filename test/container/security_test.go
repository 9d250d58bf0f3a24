package container

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func secure(change func(*runtimeapi.LinuxContainerSecurityContext)) option {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
}

// Ambient capabilities are in force for a user that is not root.
//
// cri: Capability.add_capabilities Capability.drop_capabilities LinuxContainerSecurityContext.capabilities
// cri: Capability.add_ambient_capabilities
func TestCapabilities(t *testing.T) {
	p := newPod(t)
	plain := p.run("plain", forever)
	same(t, "default", harness.ProcStatus(t, p.info(plain).PID, "CapEff"), "00000000a80425fb")
	changed := p.run("changed", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"ALL"}}
	}))
	same(t, "NET_ADMIN alone", harness.ProcStatus(t, p.info(changed).PID, "CapEff"), "0000000000001000")
	same(t, "of an exec", strings.Fields(p.exec(changed, "grep CapEff /proc/self/status"))[1], "0000000000001000")
	ambient := p.run("ambient", forever, asUser(1000), secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}}
	}))
	for _, set := range []string{"CapAmb", "CapEff", "CapPrm"} {
		same(t, set, harness.ProcStatus(t, p.info(ambient).PID, set), "0000000000000400")
	}
	same(t, "CapAmb of an exec", p.exec(ambient, "grep CapAmb /proc/self/status"), "CapAmb:\t0000000000000400")
}

// cri: LinuxContainerSecurityContext.privileged LinuxSandboxSecurityContext.privileged
func TestPrivileged(t *testing.T) {
	p := newPod(t, privilegedPod)
	id := p.run("app", forever, privileged)
	p.exec(id, "mount -t tmpfs x /tmp && umount /tmp && test -e /dev/kmsg && test -w /sys && unshare -U true")
	same(t, "seccomp", harness.ProcStatus(t, p.info(id).PID, "Seccomp"), "0")
}

// cri: LinuxContainerSecurityContext.no_new_privs LinuxContainerSecurityContext.seccomp
// cri: LinuxContainerSecurityContext.seccomp_profile_path
func TestSeccompAndNoNewPrivs(t *testing.T) {
	p := newPod(t)
	profile := filepath.Join(t.TempDir(), "profile.json")
	check(t, os.WriteFile(profile, []byte(`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO"}]}`), 0o600))
	for name, c := range map[string]struct {
		change                func(*runtimeapi.LinuxContainerSecurityContext)
		seccomp, noNew, holds string
	}{
		"free": {func(*runtimeapi.LinuxContainerSecurityContext) {}, "0", "0", "unshare -U true"},
		"confined": {func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp, s.NoNewPrivs = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}, true
		}, "2", "1", "! unshare -U true"},
		// The older form is still sent.
		"by-path": {func(s *runtimeapi.LinuxContainerSecurityContext) { s.SeccompProfilePath = "localhost/" + profile }, "2", "0", "! mkdir /tmp/x && touch /tmp/y"},
	} {
		id := p.run(name, forever, secure(c.change))
		same(t, name+": seccomp", harness.ProcStatus(t, p.info(id).PID, "Seccomp"), c.seccomp)
		same(t, name+": no_new_privs", harness.ProcStatus(t, p.info(id).PID, "NoNewPrivs"), c.noNew)
		p.exec(id, c.holds)
	}
}

// cri: LinuxContainerSecurityContext.masked_paths LinuxContainerSecurityContext.readonly_paths
// cri: LinuxContainerSecurityContext.readonly_rootfs
func TestReadonlyAndMasked(t *testing.T) {
	p := newPod(t)
	id := p.run("readonly", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.ReadonlyRootfs = true
		s.MaskedPaths, s.ReadonlyPaths = []string{"/proc/version", "/srv"}, []string{"/proc/sys"}
	}))
	p.exec(id, "! touch /new 2>/dev/null; test -z \"$(cat /proc/version)\"; test -z \"$(ls /srv)\"; ! echo x > /proc/sys/kernel/hostname")
	id = p.run("writable", forever)
	p.exec(id, "touch /new && test -n \"$(cat /proc/version)\"")
}

// cri: ContainerConfig.devices Device.container_path Device.host_path Device.permissions
func TestDevices(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Devices = []*runtimeapi.Device{{HostPath: "/dev/kmsg", ContainerPath: "/dev/given", Permissions: "w"}}
	})
	p.exec(id, "(: > /dev/given) && ! (: < /dev/given)")
	// One that is made by hand is closed: the cgroup does not have it.
	p.exec(id, "mknod /tmp/loop c 10 237 && ! (: > /tmp/loop)")
}
