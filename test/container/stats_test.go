package container

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
)

// kernelNumbers are where the kernel has the numbers of a container: files of version 1,
// below their controller, and of version 2, some with the key of a line.
var kernelNumbers = map[string][2]string{
	"cpu":    {"cpuacct/cpuacct.usage", "cpu.stat usage_usec"},
	"usage":  {"memory/memory.usage_in_bytes", "memory.current"},
	"anon":   {"memory/memory.stat total_rss", "memory.stat anon"},
	"faults": {"memory/memory.stat total_pgfault", "memory.stat pgfault"},
	"major":  {"memory/memory.stat total_pgmajfault", "memory.stat pgmajfault"},
}

// kernels are the numbers of a container as the kernel has them.
func (p *pod) kernels(path string) map[string]uint64 {
	p.t.Helper()
	numbers := make(map[string]uint64)
	for name, of := range kernelNumbers {
		file, key, _ := strings.Cut(of[1], " ")
		file = filepath.Join("/sys/fs/cgroup", path, file)
		if !cgroup.Unified() {
			file, key, _ = strings.Cut(of[0], " ")
			file = filepath.Join("/sys/fs/cgroup", filepath.Dir(file), path, filepath.Base(file))
		}
		data, err := os.ReadFile(file)
		check(p.t, err)
		for line := range strings.Lines(string(data)) {
			words := strings.Fields(line)
			if key == "" || words[0] == key {
				numbers[name], err = strconv.ParseUint(words[len(words)-1], 10, 64)
				check(p.t, err)
			}
		}
	}
	if cgroup.Unified() {
		numbers["cpu"] *= 1000
	}
	return numbers
}

// within fails unless a number is between what the kernel said before and after,
// give or take.
func within(t *testing.T, what string, before, got, after, slack uint64) {
	t.Helper()
	if got+slack < min(before, after) || got > max(before, after)+slack {
		t.Errorf("%s: %d, the kernel says %d before and %d after", what, got, before, after)
	}
}

// The numbers of a container are those of its cgroup at that moment; pressure and
// swap are there exactly where the kernel counts them. A page that has to come from the
// disk is a major fault.
//
// cri: ContainerStats.cpu ContainerStats.io ContainerStats.memory ContainerStats.swap CpuUsage.psi CpuUsage.timestamp
// cri: CpuUsage.usage_core_nano_seconds CpuUsage.usage_nano_cores IoUsage.psi IoUsage.timestamp MemoryUsage.available_bytes
// cri: MemoryUsage.page_faults MemoryUsage.psi MemoryUsage.rss_bytes MemoryUsage.timestamp MemoryUsage.usage_bytes
// cri: MemoryUsage.working_set_bytes PsiData.Avg10 PsiData.Avg300 PsiData.Avg60 PsiData.Total PsiStats.Full PsiStats.Some
// cri: SwapUsage.swap_available_bytes SwapUsage.swap_usage_bytes SwapUsage.timestamp MemoryUsage.major_page_faults
func TestStatsAreTheKernels(t *testing.T) {
	p := newPod(t)
	const limit = 256 << 20
	id := p.run("app", "mkdir /disk; cp /bin/busybox /disk/; sync; x=$(head -c 8000000 /dev/zero | tr '\\0' a); echo ready; while true; do i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done; sleep 0.05; done", memory(limit))
	p.awaitLine(id, "ready")
	path := p.info(id).CgroupsPath
	p.containerStats(id) // the rate of CPU is that since the last time
	time.Sleep(time.Second)
	start := p.kernels(path)
	file, err := os.Open(fmt.Sprintf("/proc/%d/root/disk/busybox", p.info(id).PID))
	check(t, err)
	check(t, unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED))
	check(t, file.Close())
	p.exec(id, "/disk/busybox true")
	before := p.kernels(path)
	s := p.containerStats(id)
	after := p.kernels(path)
	const slack = 4 << 20 // per-CPU counts of pages are added up late
	within(t, "cpu", before["cpu"], s.Cpu.GetUsageCoreNanoSeconds().GetValue(), after["cpu"], 0)
	within(t, "memory usage", before["usage"], s.Memory.GetUsageBytes().GetValue(), after["usage"], slack)
	within(t, "rss", before["anon"], s.Memory.GetRssBytes().GetValue(), after["anon"], slack)
	within(t, "page faults", before["faults"], s.Memory.GetPageFaults().GetValue(), after["faults"], 2000)
	within(t, "major faults", before["major"], s.Memory.GetMajorPageFaults().GetValue(), after["major"], 0)
	if after["anon"] < 8_000_000 || before["major"] == start["major"] {
		t.Errorf("the container holds %d bytes; it had %d major faults", after["anon"], before["major"]-start["major"])
	}
	if cores := s.Cpu.GetUsageNanoCores().GetValue(); cores == 0 || cores > 4e9 {
		t.Errorf("a rate of %d nanocores", cores)
	}
	same(t, "available", fmt.Sprint(s.Memory.GetAvailableBytes().GetValue()), fmt.Sprint(limit-s.Memory.GetWorkingSetBytes().GetValue()))
	now := time.Now().UnixNano()
	for what, at := range map[string]int64{"cpu": s.Cpu.GetTimestamp(), "memory": s.Memory.GetTimestamp()} {
		if at > now || at < now-int64(time.Minute) {
			t.Errorf("the time of %s is %v", what, time.Unix(0, at))
		}
	}
	p.pressure(path, "cpu", s.Cpu.GetPsi())
	p.pressure(path, "memory", s.Memory.GetPsi())
	p.pressure(path, "io", s.GetIo().GetPsi())
	p.swap(path, s)
}

func (p *pod) containerStats(id string) *runtimeapi.ContainerStats {
	p.t.Helper()
	answer, err := p.Runtime.ContainerStats(limited(p.t), &runtimeapi.ContainerStatsRequest{ContainerId: id})
	check(p.t, err)
	return answer.GetStats()
}

// pressure compares with the file of version 2, if it can be read: a kernel may
// have it and refuse (psi=0). Its totals are microseconds, the API's nanoseconds.
func (p *pod) pressure(path, of string, got *runtimeapi.PsiStats) {
	p.t.Helper()
	data, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", path, of+".pressure"))
	if there := err == nil; there != (got != nil) {
		p.t.Errorf("pressure of %s is %v, and of the kernel's there is %q, %v", of, got, data, err)
	}
	if got == nil {
		return
	}
	for line := range strings.Lines(string(data)) {
		kind, rest, _ := strings.Cut(line, " ")
		one := map[string]*runtimeapi.PsiData{"some": got.Some, "full": got.Full}[kind]
		_, total, _ := strings.Cut(rest, "total=")
		after, err := strconv.ParseUint(strings.TrimSpace(total), 10, 64)
		check(p.t, err)
		if one == nil || one.Total > after*1000 || one.Total%1000 != 0 || one.Avg10 > 100 || one.Avg60 > 100 || one.Avg300 > 100 {
			p.t.Errorf("pressure of %s: %v, the kernel says %s", of, one, line)
		}
	}
}

// swap is counted by a file that some kernels do not have.
func (p *pod) swap(path string, s *runtimeapi.ContainerStats) {
	p.t.Helper()
	file := filepath.Join("/sys/fs/cgroup/memory", path, "memory.memsw.usage_in_bytes")
	if cgroup.Unified() {
		file = filepath.Join("/sys/fs/cgroup", path, "memory.swap.current")
	}
	_, err := os.Stat(file)
	if counted := err == nil; counted != (s.Swap != nil) {
		p.t.Errorf("swap is %v, %s: %v", s.Swap, file, err)
	}
	if s.Swap == nil {
		return
	}
	if s.Swap.GetTimestamp() == 0 || s.Swap.GetSwapUsageBytes() == nil || s.Swap.GetSwapUsageBytes().GetValue() > 256<<20 {
		p.t.Errorf("swap is %v", s.Swap)
	}
	if left := s.Swap.GetSwapAvailableBytes(); left != nil && left.GetValue() > 1<<40 {
		p.t.Errorf("%d bytes of swap are available", left.GetValue())
	}
}

// The numbers of a pod are those of its interfaces and processes.
//
// cri: LinuxPodSandboxStats.io LinuxPodSandboxStats.memory LinuxPodSandboxStats.network LinuxPodSandboxStats.process NetworkInterfaceUsage.name
// cri: NetworkInterfaceUsage.rx_bytes NetworkInterfaceUsage.rx_errors NetworkInterfaceUsage.tx_bytes NetworkInterfaceUsage.tx_errors
// cri: NetworkUsage.default_interface NetworkUsage.interfaces NetworkUsage.timestamp ProcessUsage.process_count ProcessUsage.timestamp
func TestStatsOfAPodAreTheKernels(t *testing.T) {
	n := newNode(t)
	// A cgroup of its own, as the kubelet's pods have: in the node's there are the runs
	// of CNI plugins, too.
	p := runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = n.MakeCgroup("pod1") })
	id := p.run("app", "httpd -f -p 80")
	// A second interface, as a chain of plugins makes it.
	namespace, err := netns.GetFromPid(p.info(id).PID)
	check(t, err)
	defer namespace.Close()
	inside, err := netlink.NewHandleAt(namespace)
	check(t, err)
	check(t, inside.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "second"}}))
	address := net.JoinHostPort(p.address(), "80")
	eventually(t, "the pod answers", func() bool {
		conn, err := p.Dial(address)
		return err == nil && conn.Close() == nil
	})
	counters := func(link string) (c [4]uint64) {
		words := strings.Fields(p.exec(id, "cd /sys/class/net/"+link+"/statistics && cat rx_bytes rx_errors tx_bytes tx_errors"))
		if len(words) != len(c) {
			t.Fatalf("the statistics of %s in the container are %q", link, words)
		}
		for i := range c {
			c[i], _ = strconv.ParseUint(words[i], 10, 64)
		}
		return c
	}
	before, beforeSecond := counters("eth0"), counters("second")
	answer, err := p.Runtime.PodSandboxStats(limited(t), &runtimeapi.PodSandboxStatsRequest{PodSandboxId: p.id})
	check(t, err)
	after, afterSecond := counters("eth0"), counters("second")
	s := answer.GetStats().GetLinux()
	network := s.GetNetwork()
	if network.GetDefaultInterface().GetName() != "eth0" || len(network.GetInterfaces()) != 1 || network.GetInterfaces()[0].GetName() != "second" || network.GetTimestamp() == 0 {
		t.Fatalf("the network is %v", network)
	}
	if before[0] == 0 || before[2] == 0 {
		t.Errorf("eth0 has %v", before)
	}
	for link, c := range map[*runtimeapi.NetworkInterfaceUsage][2][4]uint64{
		network.GetDefaultInterface(): {before, after}, network.GetInterfaces()[0]: {beforeSecond, afterSecond},
	} {
		for i, got := range []uint64{link.GetRxBytes().GetValue(), link.GetRxErrors().GetValue(), link.GetTxBytes().GetValue(), link.GetTxErrors().GetValue()} {
			within(t, fmt.Sprint(link.GetName(), " counter ", i), c[0][i], got, c[1][i], 0)
		}
	}
	if s.GetMemory().GetUsageBytes().GetValue() == 0 || s.GetMemory().GetTimestamp() == 0 {
		t.Errorf("the memory is %v", s.GetMemory())
	}
	p.pressure(filepath.Dir(p.info(id).CgroupsPath), "io", s.GetIo().GetPsi())
	if count := s.GetProcess().GetProcessCount().GetValue(); count != 2 || s.GetProcess().GetTimestamp() == 0 {
		t.Errorf("%d processes, want pause and httpd", count)
	}
}
