package container

import (
	"os"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Ambient capabilities are in force for a user that is not root.
//
// cri: Capability.add_ambient_capabilities
func TestAmbientCapabilities(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.RunAsUser = &runtimeapi.Int64Value{Value: 1000}
		s.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}}
	}))
	for _, set := range []string{"CapAmb", "CapEff", "CapPrm"} {
		same(t, set, procStatus(t, p.info(id).PID, set), "0000000000000400")
	}
	same(t, "CapAmb of an exec", p.exec(id, "grep CapAmb /proc/self/status"), "CapAmb:\t0000000000000400")
}

// The memory nodes of a container are those that it asks for.
//
// cri: LinuxContainerResources.cpuset_mems
func TestMemoryNodes(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.CpusetMems = "0" })
	same(t, "nodes of the process", procStatus(t, p.info(id).PID, "Mems_allowed_list"), "0")
	same(t, "nodes by the status", p.status(id).Resources.GetLinux().GetCpusetMems(), "0")
	none, err := p.tryCreate(shell("none", forever, func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.CpusetMems = "1000" }))
	if err == nil {
		err = p.start(none)
	}
	if err == nil {
		t.Error("a container runs on a memory node that the machine does not have")
	}
}

// A seccomp profile by the path that older kubelets send confines the container.
//
// cri: LinuxContainerSecurityContext.seccomp_profile_path
func TestSeccompByPath(t *testing.T) {
	p := newPod(t)
	profile := filepath.Join(t.TempDir(), "profile.json")
	check(t, os.WriteFile(profile, []byte(`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO"}]}`), 0o600))
	id := p.run("app", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		//lint:ignore SA1019 the older form is still sent
		s.SeccompProfilePath = "localhost/" + profile
	}))
	same(t, "mode", procStatus(t, p.info(id).PID, "Seccomp"), "2")
	p.exec(id, "! mkdir /tmp/x 2>/dev/null; touch /tmp/y")
}

// A mount that is read-only recursively is so below, too; one that is only
// read-only is not.
//
// cri: Mount.readonly Mount.recursive_read_only
func TestRecursiveReadOnly(t *testing.T) {
	p := newPod(t)
	dir := filepath.Join(p.Dir, "volume")
	check(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	mountTmpfs(t, filepath.Join(dir, "sub"), 0)
	id := p.run("app", forever,
		mounted(dir, "/plain", func(m *runtimeapi.Mount) { m.Readonly = true }),
		mounted(dir, "/deep", func(m *runtimeapi.Mount) {
			m.Readonly, m.RecursiveReadOnly, m.Propagation = true, true, runtimeapi.MountPropagation_PROPAGATION_PRIVATE
		}))
	p.exec(id, "! touch /plain/x 2>/dev/null && touch /plain/sub/x")
	p.exec(id, "! touch /deep/x 2>/dev/null && ! touch /deep/sub/y 2>/dev/null && test -e /deep/sub/x")
}
