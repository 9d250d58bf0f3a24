package container

import (
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func secure(change func(*runtimeapi.LinuxContainerSecurityContext)) option {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
}

// cri: Capability.add_capabilities Capability.drop_capabilities LinuxContainerSecurityContext.capabilities
func TestCapabilities(t *testing.T) {
	p := newPod(t)
	plain := p.run("plain", forever)
	same(t, "default", procStatus(t, p.info(plain).PID, "CapEff"), "00000000a80425fb")
	changed := p.run("changed", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"ALL"}}
	}))
	same(t, "NET_ADMIN alone", procStatus(t, p.info(changed).PID, "CapEff"), "0000000000001000")
	same(t, "of an exec", strings.Fields(p.exec(changed, "grep CapEff /proc/self/status"))[1], "0000000000001000")
}

// cri: LinuxContainerSecurityContext.privileged LinuxSandboxSecurityContext.privileged
func TestPrivileged(t *testing.T) {
	p := newPod(t, func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
	id := p.run("app", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Privileged = true }))
	p.exec(id, "mount -t tmpfs x /tmp && umount /tmp && test -e /dev/kmsg && test -w /sys && unshare -U true")
	same(t, "seccomp", procStatus(t, p.info(id).PID, "Seccomp"), "0")
}

// cri: LinuxContainerSecurityContext.no_new_privs LinuxContainerSecurityContext.seccomp
func TestSeccompAndNoNewPrivs(t *testing.T) {
	p := newPod(t)
	runtimeDefault := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	id := p.run("confined", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp, s.NoNewPrivs = runtimeDefault, true
	}))
	pid := p.info(id).PID
	same(t, "seccomp", procStatus(t, pid, "Seccomp"), "2")
	same(t, "no_new_privs", procStatus(t, pid, "NoNewPrivs"), "1")
	if answer, err := p.tryExec(id, 0, "unshare", "-U", "true"); err != nil || answer.ExitCode == 0 {
		t.Errorf("unshare under the default profile: %v, %v", answer, err)
	}
	id = p.run("free", forever)
	pid = p.info(id).PID
	same(t, "seccomp", procStatus(t, pid, "Seccomp"), "0")
	same(t, "no_new_privs", procStatus(t, pid, "NoNewPrivs"), "0")
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
