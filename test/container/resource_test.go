package container

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/opencontainers/cgroups"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
)

func memory(limit int64) option {
	return func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = limit }
}

// cgroupFiles are the names of the same limit in both versions of cgroups.
var cgroupFiles = map[string][]string{
	"memory": {"memory/memory.limit_in_bytes", "memory.max"},
	"quota":  {"cpu/cpu.cfs_quota_us", "cpu.max"},
	"shares": {"cpu/cpu.shares", "cpu.weight"},
	"cpus":   {"cpuset/cpuset.cpus", "cpuset.cpus"},
	"pids":   {"pids/pids.max", "pids.max"},
}

// limit reads what the kernel has of a container's limit.
func (p *pod) limit(id, name string) string {
	p.t.Helper()
	path := p.info(id).CgroupsPath
	for _, file := range cgroupFiles[name] {
		if controller, rest, found := strings.Cut(file, "/"); found {
			file = filepath.Join("/sys/fs/cgroup", controller, path, rest)
		} else {
			file = filepath.Join("/sys/fs/cgroup", path, file)
		}
		if data, err := os.ReadFile(file); err == nil {
			value, _, _ := strings.Cut(strings.TrimSpace(string(data)), " ") // cpu.max has the period too
			return value
		}
	}
	p.t.Fatalf("no cgroup has the limit %s", name)
	return ""
}

func (p *pod) update(id string, r *runtimeapi.LinuxContainerResources) error {
	_, err := p.Runtime.UpdateContainerResources(limited(p.t), &runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: r})
	return err
}

func TestP42_Resources(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, memory(64<<20), func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources.CpuQuota, c.Linux.Resources.CpuPeriod, c.Linux.Resources.CpuShares = 50000, 100000, 512
		c.Linux.Resources.CpusetCpus, c.Linux.Resources.OomScoreAdj = "0", 500
	})
	kept := func(name, want string) {
		t.Helper()
		same(t, name, p.limit(id, name), want)
	}
	shares := "512"
	if cgroup.Unified() {
		shares = strconv.FormatUint(cgroups.ConvertCPUSharesToCgroupV2Value(512), 10)
	}
	kept("memory", "67108864")
	kept("quota", "50000")
	kept("shares", shares)
	kept("cpus", "0")
	same(t, "oom_score_adj", p.exec(id, "cat /proc/1/oom_score_adj"), "500")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20, CpuQuota: 80000}))
	kept("memory", "100663296")
	kept("quota", "80000")
	kept("shares", shares)
	r := p.status(id).Resources.Linux
	if r.MemoryLimitInBytes != 96<<20 || r.CpuQuota != 80000 || r.CpuShares != 512 || r.CpusetCpus != "0" {
		t.Errorf("status: %v", r)
	}
	// One part that the kernel refuses: the others stay as they were.
	if err := p.update(id, &runtimeapi.LinuxContainerResources{CpuShares: 333, MemoryLimitInBytes: 80 << 20, CpusetCpus: "900"}); err == nil {
		t.Error("cpus 900 were accepted")
	}
	kept("memory", "100663296")
	kept("shares", shares)
	kept("cpus", "0")
	if now := p.status(id).Resources.Linux; now.CpuShares != 512 || now.MemoryLimitInBytes != 96<<20 {
		t.Errorf("status after a refused update: %v", now)
	}
	p.Kill()
	p.Start()
	if now := p.status(id).Resources.Linux; now.MemoryLimitInBytes != 96<<20 {
		t.Errorf("status after a restart: %v", now)
	}
	check(t, p.stop(id, 0))
	wantCode(t, p.update(id, &runtimeapi.LinuxContainerResources{CpuShares: 100}), codes.FailedPrecondition)
}

func TestUpdateBeforeStart(t *testing.T) {
	p := newPod(t)
	id := p.create(shell("app", forever))
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 32 << 20}))
	same(t, "memory", p.limit(id, "memory"), "33554432")
	check(t, p.start(id))
	same(t, "memory", p.limit(id, "memory"), "33554432")
}
