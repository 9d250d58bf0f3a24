package container

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
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
	return nodetest.Err(p.t, p.Runtime.UpdateContainerResources, &runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: r})
}

// cri: LinuxContainerResources.cpu_period LinuxContainerResources.cpuset_mems
func TestP42_Resources(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, memory(64<<20), func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources.CpuQuota, c.Linux.Resources.CpuPeriod, c.Linux.Resources.CpuShares = 50000, 100000, 512
		c.Linux.Resources.CpusetCpus, c.Linux.Resources.OomScoreAdj = "0", 500
	})
	kept := func(name, want string) { same(t, name, p.limit(id, name), want) }
	shares := "512"
	if cgroup.Unified() {
		shares = strconv.FormatUint(cgroups.ConvertCPUSharesToCgroupV2Value(512), 10)
		// Other runtimes may have the older conversion, as runc 1.1: 2 to 262144 are 1 to 10000.
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
	expect(t, r.MemoryLimitInBytes == 96<<20 && r.CpuQuota == 80000 && r.CpuShares == 512 && r.CpusetCpus == "0", "status: %v", r)
	// The status shows an update whose caller goes away, and then the supervisor.
	supervisor := p.Node.Supervisors()[0]
	harness.Freeze(t, supervisor)
	caller, leave := context.WithTimeout(t.Context(), 2*time.Second)
	defer leave()
	_, err := p.Runtime.UpdateContainerResources(caller, &runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{CpuQuota: 70000}})
	wantCode(t, err, codes.DeadlineExceeded)
	check(t, unix.Kill(supervisor, unix.SIGKILL))
	harness.Eventually(t, "the update is in force", func() bool { return p.limit(id, "quota") == "70000" })
	harness.Eventually(t, "the status shows it", func() bool { return p.status(id).Resources.Linux.CpuQuota == 70000 })
	p.Crash()
	same(t, "status after a restart", p.status(id).Resources.Linux.MemoryLimitInBytes, 96<<20)
	check(t, p.stop(id, 0))
	wantCode(t, p.update(id, &runtimeapi.LinuxContainerResources{CpuShares: 100}), codes.FailedPrecondition)
	mems := func(nodes string) option {
		return func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.CpusetMems = nodes }
	}
	id = p.run("mems", forever, mems("0"))
	same(t, "memory nodes of the process", harness.ProcStatus(t, p.info(id).PID, "Mems_allowed_list"), "0")
	same(t, "memory nodes by the status", p.status(id).Resources.GetLinux().GetCpusetMems(), "0")
	wantError(t, p.runErr(shell("none", forever, mems("1000"))))
}

// A refused update leaves nothing in force, also of what had no value before,
// and says which field is wrong before the kernel is asked.
//
// cri: LinuxContainerResources.cpu_quota LinuxContainerResources.cpuset_cpus LinuxContainerResources.memory_swap_limit_in_bytes
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
		wantError(t, err, field)
		expect(t, strings.Count(fmt.Sprint(err), "update container") == 1, "the error repeats itself: %v", err)
		same(t, "after a refused update of "+field, look(), before)
	}
}

func huge(limit uint64) []*runtimeapi.HugepageLimit {
	return []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: limit}}
}

// onlyTheKernelRefuses are resources that nothing but the kernel knows to be wrong, and
// only when others are set: it says EINVAL.
func (p *pod) onlyTheKernelRefuses(id string) *runtimeapi.LinuxContainerResources {
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

// What an update gives a value is in force for all processes, those of later commands too, and the status shows it,
// once, and before the start; what this machine has no controller for is not shown as if it were in force. An
// update of annotations alone changes nothing, and is no error: they are for plugins.
//
// cri: ContainerResources.linux ContainerResources.windows ContainerStatus.resources HugepageLimit.limit HugepageLimit.page_size
// cri: LinuxContainerConfig.resources LinuxContainerResources.hugepage_limits LinuxContainerResources.oom_score_adj
// cri: LinuxContainerResources.memory_limit_in_bytes UpdateContainerResourcesRequest.linux UpdateContainerResourcesRequest.annotations
func TestStatusIsWhatIsInForce(t *testing.T) {
	p := newPod(t)
	id := p.create(shell("app", "sleep 1000000 & "+forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources.OomScoreAdj = 300
		c.Linux.Resources.HugepageLimits = huge(4 << 20)
	}))
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 32 << 20}))
	same(t, "memory", p.limit(id, "memory"), "33554432")
	check(t, p.start(id))
	same(t, "memory", p.limit(id, "memory"), "33554432")
	p.awaitLine(id, "ready")
	for range 3 {
		check(t, p.update(id, &runtimeapi.LinuxContainerResources{OomScoreAdj: 600, MemoryLimitInBytes: 96 << 20, HugepageLimits: huge(8 << 20)}))
	}
	same(t, "oom_score_adj of all", p.exec(id, "cat /proc/[0-9]*/oom_score_adj | sort -u"), "600")
	expect(t, p.status(id).Resources.Windows == nil, "resources of Windows: %v", p.status(id))
	now := p.status(id).Resources.Linux
	expect(t, now.OomScoreAdj == 600 && now.MemoryLimitInBytes == 96<<20, "status: %v", now)
	kernel := p.limit(id, "huge")
	if kernel == "" {
		same(t, "limits of huge pages, for which this machine has no controller", len(now.HugepageLimits), 0)
	} else {
		same(t, "limits of huge pages, and that of the kernel", fmt.Sprint(now.HugepageLimits, kernel), fmt.Sprint(huge(8<<20), "8388608"))
	}
	before := p.status(id)
	nodetest.Call(t, p.Runtime.UpdateContainerResources, &runtimeapi.UpdateContainerResourcesRequest{
		ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{}, Annotations: map[string]string{"of.a/plugin": "x"},
	})
	same(t, "status after an update of annotations", p.status(id).String(), before.String())
	free := p.status(p.create(shell("other", forever))).Resources.Linux
	expect(t, free.MemoryLimitInBytes == 0 && len(free.HugepageLimits) == 0, "status of a container without limits: %v", free)
}

// within fails unless a number is between what the kernel said before and after, give or take.
func within(t *testing.T, what string, before, got, after, slack uint64) {
	holds := got+slack >= min(before, after) && got <= max(before, after)+slack
	expect(t, holds, "%s: %d, the kernel says %d before and %d after", what, got, before, after)
}

// The numbers of a pod are those of its interfaces and processes.
//
// cri: LinuxPodSandboxStats.io LinuxPodSandboxStats.memory LinuxPodSandboxStats.network LinuxPodSandboxStats.process NetworkInterfaceUsage.name
// cri: NetworkInterfaceUsage.rx_bytes NetworkInterfaceUsage.rx_errors NetworkInterfaceUsage.tx_bytes NetworkInterfaceUsage.tx_errors
// cri: NetworkUsage.default_interface NetworkUsage.interfaces NetworkUsage.timestamp ProcessUsage.process_count ProcessUsage.timestamp
//
// attack: containers: a pod with NET_ADMIN creates as many interfaces as it can, one with a name that is not UTF-8
// held: the statistics of all pods are listed, with U+FFFD in the name, and with a hundred of the interfaces
func TestStatsOfAPodAreTheKernels(t *testing.T) {
	n := newNode(t)
	// A cgroup of its own, as the kubelet's pods have: in the node's there are the runs of CNI plugins, too.
	p := runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = n.MakeCgroup("pod1") })
	id := p.run("app", "httpd -f -p 80")
	// A second interface, as a chain of plugins makes it, or a container, whose name for it need not be text.
	namespace, err := netns.GetFromPid(p.info(id).PID)
	check(t, err)
	defer namespace.Close()
	inside, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	check(t, err)
	check(t, inside.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "second\xff"}}))
	for i := range 120 {
		check(t, inside.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("more", i)}}))
	}
	address := net.JoinHostPort(p.address(), "80")
	harness.Eventually(t, "the pod answers", func() bool {
		conn, err := p.Dial(address)
		return err == nil && conn.Close() == nil
	})
	counters := func(link string) (c [4]uint64) {
		words := strings.Fields(p.exec(id, "cd /sys/class/net/"+link+"/statistics && cat rx_bytes rx_errors tx_bytes tx_errors"))
		harness.Need(t, len(words) == len(c), "the statistics of %s in the container are %q", link, words)
		for i := range c {
			c[i], _ = strconv.ParseUint(words[i], 10, 64)
		}
		return c
	}
	before, beforeSecond := counters("eth0"), counters("second*")
	answer := nodetest.Call(t, p.Runtime.PodSandboxStats, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: p.id})
	after, afterSecond := counters("eth0"), counters("second*")
	s := answer.GetStats().GetLinux()
	network := s.GetNetwork()
	all := network.GetInterfaces()
	harness.Need(t, len(all) > 1 && len(all) <= 101, "there are %d interfaces", len(all))
	same(t, "the default interface", network.GetDefaultInterface().GetName(), "eth0")
	same(t, "the first in the list", all[0].GetName(), "eth0") // as with containerd
	same(t, "the second in the list", all[1].GetName(), "second\uFFFD")
	harness.Want(t, network.GetTimestamp() != 0, "the network has no time")
	expect(t, before[0] != 0 && before[2] != 0, "eth0 has %v", before)
	for link, c := range map[*runtimeapi.NetworkInterfaceUsage][2][4]uint64{
		all[0]: {before, after}, all[1]: {beforeSecond, afterSecond},
	} {
		for i, got := range []uint64{link.GetRxBytes().GetValue(), link.GetRxErrors().GetValue(), link.GetTxBytes().GetValue(), link.GetTxErrors().GetValue()} {
			within(t, fmt.Sprint(link.GetName(), " counter ", i), c[0][i], got, c[1][i], 0)
		}
	}
	expect(t, s.GetMemory().GetUsageBytes().GetValue() != 0 && s.GetMemory().GetTimestamp() != 0, "the memory is %v", s.GetMemory())
	expect(t, s.GetProcess().GetTimestamp() != 0, "the processes are %v", s.GetProcess())
	harness.Eventually(t, "pause and httpd are counted, and no child any more that took the connection", func() bool {
		answer := nodetest.Call(t, p.Runtime.PodSandboxStats, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: p.id})
		return answer.GetStats().GetLinux().GetProcess().GetProcessCount().GetValue() == 2
	})
}
