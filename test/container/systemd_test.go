//go:build vm

package container

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// These tests need a machine that systemd runs, with cgroup v2 alone, and the
// driver systemd (MINICRI_CGROUP_DRIVER): that is the guest of hack/um.

// newSlicedPod makes a pod as a kubelet does, in a slice of its own.
func newSlicedPod(t *testing.T) (p *pod, slice string) {
	t.Helper()
	n := newNode(t)
	slice = n.MakeCgroup("pod1")
	return runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = slice }), slice
}

// file reads a file of a cgroup of version 2.
func file(t *testing.T, path, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", path, name))
	check(t, err)
	return strings.TrimSpace(string(data))
}

// property asks systemd for what it thinks of a unit.
func property(t *testing.T, unit, name string) string {
	t.Helper()
	value, err := exec.Command("systemctl", "show", "--value", "--property", name, unit).Output()
	check(t, err)
	return strings.TrimSpace(string(value))
}

func TestContainersAreScopesOfThePodsSlice(t *testing.T) {
	p, slice := newSlicedPod(t)
	id := p.run("app", forever)
	path := p.info(id).CgroupsPath
	same(t, "slice", filepath.Dir(path), slice)
	same(t, "state of "+path, property(t, filepath.Base(path), "ActiveState"), "active")
	same(t, "slice by systemd", property(t, filepath.Base(path), "Slice"), filepath.Base(slice))
	same(t, "delegation", property(t, filepath.Base(path), "Delegate"), "yes")
	pid := strconv.Itoa(p.info(id).PID)
	if data, _ := os.ReadFile("/proc/" + pid + "/cgroup"); strings.TrimSpace(string(data)) != "0::"+path {
		t.Errorf("the container is in %s, not in %s", data, path)
	}
	scopes, err := filepath.Glob("/sys/fs/cgroup" + slice + "/*.scope")
	if err != nil || len(scopes) != 2 {
		t.Errorf("want a scope for pause and one for the container, got %v, %v", scopes, err)
	}
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	check(t, p.stop(id, 10))
	check(t, p.remove(id))
	eventually(t, "systemd forgets the scope", func() bool { return property(t, filepath.Base(path), "LoadState") == "not-found" })
}

// systemd must not keep the scopes of pods that are gone: the harness looks.
func TestScopesOfPods(t *testing.T) {
	n := newNode(t)
	for range 10 {
		n.RemovePod(n.RunPod(n.PodConfig("web")))
	}
}

// An update has to last: systemd sets again what it knows when it is reloaded.
func TestLimitsStayWhenSystemdIsReloaded(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", forever, memory(64<<20), func(c *runtimeapi.ContainerConfig) {
		r := c.Linux.Resources
		r.CpuShares, r.CpuQuota, r.CpuPeriod, r.CpusetCpus = 512, 50000, 100000, "0"
	})
	path := p.info(id).CgroupsPath
	limits := func(when string, want map[string]string) {
		t.Helper()
		for name, value := range want {
			same(t, when+": "+name, file(t, path, name), value)
		}
	}
	limits("created", map[string]string{"memory.max": "67108864", "cpu.max": "50000 100000", "cpuset.cpus": "0"})
	weight := file(t, path, "cpu.weight")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20, CpuQuota: 80000, CpuShares: 2048}))
	updated := map[string]string{"memory.max": "100663296", "cpu.max": "80000 100000", "cpuset.cpus": "0", "cpu.weight": file(t, path, "cpu.weight")}
	if updated["cpu.weight"] == weight {
		t.Errorf("the weight is still %s", weight)
	}
	limits("updated", updated)
	check(t, exec.Command("systemctl", "daemon-reload").Run())
	limits("reloaded", updated)
	// The device rules are systemd's too.
	p.exec(id, ": > /dev/null; mknod /tmp/loop c 10 237 && ! (: > /tmp/loop)")
}

// systemd removes the cgroup of a scope as soon as that is empty: the counter
// of the kernel's kills goes with it.
func TestOOMKillsAreSeen(t *testing.T) {
	p, _ := newSlicedPod(t)
	const times = 10
	for i := range times {
		id := p.run("oom", "exec tail /dev/zero", memory(16<<20), attempt(uint32(i)))
		p.wantExit(id, 137, "OOMKilled")
		check(t, p.remove(id))
	}
	// One that is killed otherwise is not taken for it.
	for i := range times {
		id := p.run("killed", forever, memory(16<<20), attempt(uint32(i)))
		check(t, p.stop(id, 0))
		p.wantExit(id, 137, "Error")
	}
}

func TestStatsOfSlices(t *testing.T) {
	p, slice := newSlicedPod(t)
	id := p.run("app", "dd if=/dev/zero of=/dev/shm/x bs=1M count=20 2>/dev/null; while :; do :; done", memory(128<<20))
	time.Sleep(2 * time.Second)
	container, err := p.Runtime.ContainerStats(limited(t), &runtimeapi.ContainerStatsRequest{ContainerId: id})
	check(t, err)
	sandbox, err := p.Runtime.PodSandboxStats(limited(t), &runtimeapi.PodSandboxStatsRequest{PodSandboxId: p.id})
	check(t, err)
	path := p.info(id).CgroupsPath
	atMost := func(what string, got *runtimeapi.UInt64Value, low, high uint64) {
		t.Helper()
		if got.GetValue() < low || got.GetValue() > high {
			t.Errorf("%s: want from %d to %d, got %v", what, low, high, got)
		}
	}
	cpu := func(path string) uint64 {
		var micros uint64
		_, err := fmt.Sscanf(file(t, path, "cpu.stat"), "usage_usec %d", &micros)
		check(t, err)
		return micros * 1000
	}
	s := container.Stats
	atMost("CPU", s.Cpu.UsageCoreNanoSeconds, 100e6, cpu(path))
	atMost("working set", s.Memory.WorkingSetBytes, 20<<20, 60<<20)
	atMost("memory that is left", s.Memory.AvailableBytes, 1<<20, 108<<20)
	pod := sandbox.Stats.Linux
	atMost("CPU of the pod", pod.Cpu.UsageCoreNanoSeconds, s.Cpu.UsageCoreNanoSeconds.GetValue(), cpu(slice))
	atMost("working set of the pod", pod.Memory.WorkingSetBytes, 20<<20, 80<<20)
	atMost("processes of the pod", pod.Process.ProcessCount, 2, 4)
	if pod.Cpu.GetPsi().GetSome() == nil || pod.Memory.GetPsi().GetFull() == nil || s.Io.GetPsi().GetSome() == nil {
		t.Errorf("no pressure: %v, %v, %v", pod.Cpu, pod.Memory, s.Io)
	}
}

// A container may divide its own cgroup, as a nested init does: then no process
// can be in the cgroup itself.
func TestCgroupsInsideOfAScope(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", "exec sleep 1000000")
	path := p.info(id).CgroupsPath
	dir := filepath.Join("/sys/fs/cgroup", path)
	check(t, os.Mkdir(filepath.Join(dir, "inner"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "inner/cgroup.procs"), []byte(strconv.Itoa(p.info(id).PID)), 0))
	check(t, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory"), 0))
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	check(t, p.stop(id, 0))
	check(t, p.remove(id))
	eventually(t, path+" is gone", func() bool { _, err := os.Stat(dir); return err != nil })
}

// One that sees the machine's cgroups can leave its own, and ends all the same.
func TestContainerThatLeavesItsScope(t *testing.T) {
	p := runPod(t, newNode(t), "web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
	outside := "/sys/fs/cgroup/outside-" + p.id[:8]
	id := p.run("app", "mkdir "+outside+" && echo $$ > "+outside+"/cgroup.procs && "+forever,
		secure(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Privileged = true }))
	p.awaitLine(id, "ready")
	if processes, err := os.ReadFile(outside + "/cgroup.procs"); err != nil || len(processes) == 0 {
		t.Fatalf("it has not left: %v", err)
	}
	check(t, p.stop(id, 0))
	p.wantExit(id, 137, "Error")
	check(t, p.remove(id))
	check(t, os.Remove(outside))
}
