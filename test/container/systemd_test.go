//go:build vm

package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// These tests need a machine that systemd runs, with cgroup v2 alone, and the
// driver systemd (MINICRI_CGROUP_DRIVER): that is the guest of hack/um.

// newSlicedPod makes a pod as a kubelet does, in a slice of its own.
func newSlicedPod(t *testing.T) (p *pod, slice string) {
	n := newNode(t)
	slice = n.MakeCgroup("pod1")
	return runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = slice }), slice
}

func file(t *testing.T, path, name string) string {
	return strings.TrimSpace(string(harness.Read(t, filepath.Join("/sys/fs/cgroup", path, name))))
}

// property asks systemd for what it thinks of a unit.
func property(t *testing.T, unit, name string) string {
	return program(t, "systemctl", "show", "--value", "--property", name, unit)
}

func TestContainersAreScopesOfThePodsSlice(t *testing.T) {
	p, slice := newSlicedPod(t)
	id := p.run("app", forever)
	path := p.info(id).CgroupsPath
	same(t, "slice", filepath.Dir(path), slice)
	same(t, "state of "+path, property(t, filepath.Base(path), "ActiveState"), "active")
	same(t, "slice by systemd", property(t, filepath.Base(path), "Slice"), filepath.Base(slice))
	same(t, "delegation", property(t, filepath.Base(path), "Delegate"), "yes")
	data, _ := os.ReadFile("/proc/" + strconv.Itoa(p.info(id).PID) + "/cgroup")
	expect(t, strings.TrimSpace(string(data)) == "0::"+path, "the container is in %s, not in %s", data, path)
	scopes, err := filepath.Glob("/sys/fs/cgroup" + slice + "/*.scope")
	expect(t, err == nil && len(scopes) == 2, "want a scope for pause and one for the container, got %v, %v", scopes, err)
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	check(t, p.stop(id, 10))
	check(t, p.remove(id))
	harness.Eventually(t, "systemd forgets the scope", func() bool { return property(t, filepath.Base(path), "LoadState") == "not-found" })
}

// An update has to last: systemd sets again what it knows when it is reloaded.
func TestLimitsStayWhenSystemdIsReloaded(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", forever, memory(64<<20), func(c *runtimeapi.ContainerConfig) {
		r := c.Linux.Resources
		r.CpuShares, r.CpuQuota, r.CpuPeriod, r.CpusetCpus = 512, 50000, 100000, "0"
	})
	path := p.info(id).CgroupsPath
	limits := func() []string {
		return []string{file(t, path, "memory.max"), file(t, path, "cpu.max"), file(t, path, "cpuset.cpus")}
	}
	same(t, "created", limits(), []string{"67108864", "50000 100000", "0"})
	before := file(t, path, "cpu.weight")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20, CpuQuota: 80000, CpuShares: 2048}))
	updated, weight := []string{"100663296", "80000 100000", "0"}, file(t, path, "cpu.weight")
	expect(t, weight != before, "the weight is still %s", weight)
	same(t, "updated", limits(), updated)
	program(t, "systemctl", "daemon-reload")
	same(t, "reloaded", append(limits(), file(t, path, "cpu.weight")), append(updated, weight))
	// The device rules are systemd's too.
	p.exec(id, ": > /dev/null; mknod /tmp/loop c 10 237 && ! (: > /tmp/loop)")
}

// systemd removes the cgroup of a scope as soon as that is empty: the counter of the kernel's kills goes with it.
func TestOOMKillsAreSeen(t *testing.T) {
	p, _ := newSlicedPod(t)
	for i := range 10 {
		id := p.run("oom", "exec tail /dev/zero", memory(16<<20), attempt(uint32(i)))
		p.wantExit(id, 137, "OOMKilled")
		check(t, p.remove(id))
	}
	// One that is killed otherwise is not taken for it.
	killed := p.run("killed", forever, memory(16<<20))
	check(t, p.stop(killed, 0))
	p.wantExit(killed, 137, "Error")
}

// A container may divide its own cgroup, as a nested init does: then no process can be in the cgroup itself.
func TestCgroupsInsideOfAScope(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", "exec sleep 1000000")
	path := p.info(id).CgroupsPath
	dir := filepath.Join("/sys/fs/cgroup", path)
	check(t, os.Mkdir(filepath.Join(dir, "inner"), 0o755))
	// One of threads, as a virtual machine has for its processors: then every other is of threads, or none.
	check(t, os.WriteFile(filepath.Join(dir, "inner/cgroup.type"), []byte("threaded"), 0))
	same(t, "exec beside threads", p.exec(id, "echo hi"), "hi")
	check(t, os.Remove(filepath.Join(dir, "inner")))
	check(t, os.Mkdir(filepath.Join(dir, "inner"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "inner/cgroup.procs"), []byte(strconv.Itoa(p.info(id).PID)), 0))
	check(t, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory"), 0))
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	check(t, p.stop(id, 0))
	check(t, p.remove(id))
	harness.Eventually(t, path+" is gone", func() bool { _, err := os.Stat(dir); return err != nil })
}

// One that sees the machine's cgroups can leave its own, and ends all the same.
func TestContainerThatLeavesItsScope(t *testing.T) {
	p := newPod(t, privilegedPod)
	outside := "/sys/fs/cgroup/outside-" + p.id[:8]
	id := p.run("app", "mkdir "+outside+" && echo $$ > "+outside+"/cgroup.procs && "+forever, privileged)
	p.awaitLine(id, "ready")
	processes, err := os.ReadFile(outside + "/cgroup.procs")
	expect(t, err == nil && len(processes) > 0, "it has not left: %v", err)
	check(t, p.stop(id, 0))
	p.wantExit(id, 137, "Error")
	check(t, p.remove(id))
	check(t, os.Remove(outside))
}

// What is asked for by the name of a file of cgroup v2 is written to it, at the
// creation and by an update, which keeps the other keys.
//
// cri: LinuxContainerResources.unified
func TestUnified(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources.Unified = map[string]string{"memory.high": "67108864", "pids.max": "50", "memory.oom.group": "1"}
	})
	path := p.info(id).CgroupsPath
	same(t, "memory.high", file(t, path, "memory.high"), "67108864")
	same(t, "pids.max", file(t, path, "pids.max"), "50")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{Unified: map[string]string{"memory.high": "33554432"}}))
	same(t, "memory.high after the update", file(t, path, "memory.high"), "33554432")
	same(t, "pids.max after the update", file(t, path, "pids.max"), "50")
	same(t, "memory.oom.group after the update", file(t, path, "memory.oom.group"), "1")
	unified := p.status(id).Resources.GetLinux().GetUnified()
	expect(t, unified["memory.high"] == "33554432" && unified["pids.max"] == "50", "the status says %v", unified)
}

func appArmor(kind runtimeapi.SecurityProfile_ProfileType, name string) option {
	return secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: name}
	})
}

func confinement(t *testing.T, pid int) string {
	return strings.TrimRight(string(harness.Read(t, fmt.Sprintf("/proc/%d/attr/apparmor/current", pid))), "\n\x00")
}

// cri: LinuxContainerSecurityContext.apparmor
func TestAppArmor(t *testing.T) {
	p := newPod(t, func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	})
	const confined = "minicri-default (enforce)"
	same(t, "pause", confinement(t, p.pausePID()), confined)
	loadTestProfile(t)
	for name, c := range harness.Sorted(map[string]struct {
		option option
		want   string
	}{
		"unnamed":    {func(*runtimeapi.ContainerConfig) {}, confined},
		"default":    {appArmor(runtimeapi.SecurityProfile_RuntimeDefault, ""), confined},
		"unconfined": {appArmor(runtimeapi.SecurityProfile_Unconfined, ""), "unconfined"},
		"localhost":  {appArmor(runtimeapi.SecurityProfile_Localhost, testProfile), testProfile + " (enforce)"},
		"prefixed":   {appArmor(runtimeapi.SecurityProfile_Localhost, "localhost/"+testProfile), testProfile + " (enforce)"},
	}) {
		id := p.run(name, forever, c.option)
		same(t, name, confinement(t, p.info(id).PID), c.want)
		same(t, "an exec in "+name, p.exec(id, "cat /proc/self/attr/apparmor/current"), c.want)
		check(t, p.stop(id, 10))
	}
	wantCode(t, p.createErr(shell("unknown", "true", appArmor(runtimeapi.SecurityProfile_Localhost, "no-such-profile"))), codes.InvalidArgument)
	// One that takes no signals cannot be told to end.
	silent := p.run("silent", forever, appArmor(runtimeapi.SecurityProfile_Localhost, silentProfile))
	check(t, p.stop(silent, 100))
	p.wantExit(silent, 137, "Error")
	// The profile forbids what the capabilities would allow.
	admin := secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	})
	p.exec(p.run("admin", forever, admin), "! mount -t tmpfs x /tmp 2>/dev/null")
	p.exec(p.run("free", forever, admin, appArmor(runtimeapi.SecurityProfile_Unconfined, "")), "mount -t tmpfs x /tmp")
}

const testProfile, silentProfile = "minicri-test-profile", "minicri-silent-profile"

func loadTestProfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "profile")
	const form = "profile %s flags=(attach_disconnected) {\n  file,\n  capability,\n  network,\n  ptrace,%s\n}\n"
	check(t, os.WriteFile(path, fmt.Appendf(nil, form+form, testProfile, " signal,", silentProfile, ""), 0o600))
	program(t, "apparmor_parser", "-Kr", path)
	t.Cleanup(func() { program(t, "apparmor_parser", "-KR", path) })
}
