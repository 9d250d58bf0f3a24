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
	"github.com/minicri/minicri/test/harness"
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
	"huge":   {"hugetlb/hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.max"},
}

// limit reads what the kernel has of a container's limit, "" where it has none.
func (p *pod) limit(id, name string) string {
	p.t.Helper()
	path := p.info(id).CgroupsPath
	for _, file := range cgroupFiles[name] {
		controller, rest, found := strings.Cut(file, "/")
		if !found {
			controller, rest = "", file
		}
		if data, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, path, rest)); err == nil {
			value, _, _ := strings.Cut(strings.TrimSpace(string(data)), " ") // cpu.max has the period too
			return value
		}
	}
	return ""
}

func (p *pod) update(id string, r *runtimeapi.LinuxContainerResources) error {
	_, err := p.Runtime.UpdateContainerResources(limited(p.t), &runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: r})
	return err
}

// cri: LinuxContainerResources.cpu_period LinuxContainerResources.cpuset_mems
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
		// Other runtimes may have the older conversion, as runc 1.1: 2 to 262144 are
		// 1 to 10000.
		if older := strconv.Itoa(1 + (512-2)*9999/262142); os.Getenv("MINICRI_TEST_RUNTIME") != "" && p.limit(id, "shares") == older {
			shares = older
		}
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
	mems := func(nodes string) option {
		return func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.CpusetMems = nodes }
	}
	id = p.run("mems", forever, mems("0"))
	same(t, "memory nodes of the process", harness.ProcStatus(t, p.info(id).PID, "Mems_allowed_list"), "0")
	same(t, "memory nodes by the status", p.status(id).Resources.GetLinux().GetCpusetMems(), "0")
	none, err := p.tryCreate(shell("none", forever, mems("1000")))
	if err == nil {
		err = p.start(none)
	}
	if err == nil {
		t.Error("a container runs on a memory node that the machine does not have")
	}
}

// A refused update leaves nothing in force, also of what had no value before,
// and says which field is wrong before the kernel is asked.
//
// cri: LinuxContainerResources.cpu_quota LinuxContainerResources.cpuset_cpus
// cri: LinuxContainerResources.memory_swap_limit_in_bytes
func TestRefusedUpdateChangesNothing(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	names := []string{"memory", "quota", "shares", "cpus"}
	look := func() (all string) {
		for _, name := range names {
			all += name + " " + p.limit(id, name) + "\n"
		}
		return all + "oom_score_adj " + p.exec(id, "cat /proc/1/oom_score_adj") + "\n" + p.status(id).Resources.String()
	}
	before := look()
	refused := map[string]*runtimeapi.LinuxContainerResources{
		": invalid argument": p.onlyTheKernelRefuses(id),
		"linux.cpu_quota":    {MemoryLimitInBytes: 80 << 20, CpuQuota: 500},
		// Version 1 refuses it, systemd takes it.
		"linux.cpu_quota: 17592186044416":  {MemoryLimitInBytes: 80 << 20, CpuQuota: 1 << 44},
		"linux.cpu_period":                 {MemoryLimitInBytes: 80 << 20, CpuPeriod: 1},
		"linux.memory_limit_in_bytes":      {MemoryLimitInBytes: -7},
		"linux.cpuset_cpus":                {CpusetCpus: "0-x", MemoryLimitInBytes: 80 << 20},
		"linux.cpuset_mems":                {CpusetMems: "4000", MemoryLimitInBytes: 80 << 20},
		"linux.memory_swap_limit_in_bytes": {MemoryLimitInBytes: 80 << 20, MemorySwapLimitInBytes: 40 << 20},
		// The kernel, too, refuses this one, and libcontainer on version 2.
		"linux.memory_swap_limit_in_bytes: 83886080 includes": {MemorySwapLimitInBytes: 80 << 20, CpuShares: 333},
		"linux.oom_score_adj":                {OomScoreAdj: 5000},
		"linux.cpu_shares":                   {CpuShares: -1},
		"linux.hugepage_limits[0].page_size": {HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "3 MB"}}},
	}
	// Without huge pages of any size their limits are left out.
	if sizes, err := os.ReadDir("/sys/kernel/mm/hugepages"); err == nil && len(sizes) > 0 {
		refused["linux.hugepage_limits[0].page_size: this machine has no huge pages of 3MB"] = &runtimeapi.LinuxContainerResources{
			MemoryLimitInBytes: 80 << 20, HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "3MB", Limit: 1 << 30}},
		}
	}
	for field, r := range refused {
		err := p.update(id, r)
		if strings.HasPrefix(field, "linux.") {
			wantCode(t, err, codes.InvalidArgument)
		}
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("want an error that names %q, got: %v", field, err)
		} else if strings.Count(err.Error(), "update container") != 1 {
			t.Errorf("the error repeats itself: %v", err)
		}
		same(t, "after a refused update of "+field, look(), before)
	}
}

// onlyTheKernelRefuses are resources that nothing but the kernel knows to be wrong, and
// only when others are set: it says EINVAL.
func (p *pod) onlyTheKernelRefuses(id string) *runtimeapi.LinuxContainerResources {
	p.t.Helper()
	r := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 80 << 20, CpuShares: 333, CpusetCpus: "0", OomScoreAdj: 700}
	if cgroup.Unified() {
		r.Unified = map[string]string{"cgroup.max.depth": "none"}
		return r
	}
	// More than the cgroup above has.
	above := filepath.Join("/sys/fs/cgroup/cpu", p.info(id).CgroupsPath, "..", "cpu.cfs_quota_us")
	check(p.t, os.WriteFile(above, []byte("500000"), 0))
	p.t.Cleanup(func() { _ = os.WriteFile(above, []byte("-1"), 0) }) // gone with the pod, if that is its own
	r.CpuQuota = 900000
	return r
}

// What an update gives a value is in force for all processes, those of later
// commands too, and the status shows it, once, and before the start; what this machine has
// no controller for is not shown as if it were in force. An update of annotations alone
// changes nothing, and is no error: they are for plugins.
//
// cri: ContainerResources.linux ContainerResources.windows ContainerStatus.resources HugepageLimit.limit HugepageLimit.page_size
// cri: LinuxContainerConfig.resources LinuxContainerResources.hugepage_limits
// cri: LinuxContainerResources.oom_score_adj LinuxContainerResources.memory_limit_in_bytes
// cri: UpdateContainerResourcesRequest.linux UpdateContainerResourcesRequest.annotations
func TestStatusIsWhatIsInForce(t *testing.T) {
	p := newPod(t)
	id := p.create(shell("app", "sleep 1000000 & "+forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources.OomScoreAdj = 300
		c.Linux.Resources.HugepageLimits = []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 4 << 20}}
	}))
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 32 << 20}))
	same(t, "memory", p.limit(id, "memory"), "33554432")
	check(t, p.start(id))
	same(t, "memory", p.limit(id, "memory"), "33554432")
	p.awaitLine(id, "ready")
	for range 3 {
		check(t, p.update(id, &runtimeapi.LinuxContainerResources{
			OomScoreAdj: 600, MemoryLimitInBytes: 96 << 20,
			HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 8 << 20}},
		}))
	}
	same(t, "oom_score_adj of all", p.exec(id, "cat /proc/[0-9]*/oom_score_adj | sort -u"), "600")
	if other := p.status(id).Resources.Windows; other != nil {
		t.Errorf("resources of Windows: %v", other)
	}
	now := p.status(id).Resources.Linux
	if now.OomScoreAdj != 600 || now.MemoryLimitInBytes != 96<<20 {
		t.Errorf("status: %v", now)
	}
	kernel := p.limit(id, "huge")
	switch {
	case kernel == "" && len(now.HugepageLimits) > 0:
		t.Errorf("this machine has no hugetlb controller, and the status shows %v", now.HugepageLimits)
	case kernel != "" && (len(now.HugepageLimits) != 1 || now.HugepageLimits[0].Limit != 8<<20 || kernel != "8388608"):
		t.Errorf("the kernel has %s, the status %v", kernel, now.HugepageLimits)
	}
	before := p.status(id)
	_, err := p.Runtime.UpdateContainerResources(limited(t), &runtimeapi.UpdateContainerResourcesRequest{
		ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{}, Annotations: map[string]string{"of.a/plugin": "x"},
	})
	check(t, err)
	same(t, "status after an update of annotations", p.status(id).String(), before.String())
	if unlimited := p.status(p.create(shell("other", forever))).Resources.Linux; unlimited.MemoryLimitInBytes != 0 || len(unlimited.HugepageLimits) > 0 {
		t.Errorf("status of a container without limits: %v", unlimited)
	}
}
