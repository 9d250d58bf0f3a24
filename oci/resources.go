package oci

import (
	"cmp"
	"maps"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// pauseCPUShares is the least weight there is: pause only sleeps.
const pauseCPUShares = 2

func sandboxResources(_ *Sandbox, spec *specs.Spec) error {
	shares := uint64(pauseCPUShares)
	spec.Linux.Resources = &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}}
	return nil
}

// containerResources: what the container asks for over what the base spec has.
func containerResources(c *Container, spec *specs.Spec) error {
	limits := Resources(c.Config.GetLinux().GetResources(), c.Machine)
	if base := spec.Linux.Resources; base != nil {
		limits = onBase(base, limits)
		DropUnsupported(limits, c.Machine)
	}
	if c.PidsLimit > 0 && slices.Contains(c.Machine.Controllers, "pids") {
		limits.Pids = &specs.LinuxPids{Limit: &c.PidsLimit}
	}
	spec.Linux.Resources = limits
	return nil
}

// onBase gives base with what is specified in asked in its place.
func onBase(base, asked *specs.LinuxResources) *specs.LinuxResources {
	if base.CPU == nil {
		base.CPU = &specs.LinuxCPU{}
	}
	replace(&base.CPU.Shares, asked.CPU.Shares)
	replace(&base.CPU.Quota, asked.CPU.Quota)
	replace(&base.CPU.Period, asked.CPU.Period)
	base.CPU.Cpus, base.CPU.Mems = cmp.Or(asked.CPU.Cpus, base.CPU.Cpus), cmp.Or(asked.CPU.Mems, base.CPU.Mems)
	if base.Memory == nil {
		base.Memory = &specs.LinuxMemory{}
	}
	if asked.Memory != nil {
		replace(&base.Memory.Limit, asked.Memory.Limit)
		replace(&base.Memory.Swap, asked.Memory.Swap)
	}
	for _, limit := range asked.HugepageLimits {
		base.HugepageLimits = slices.DeleteFunc(base.HugepageLimits, func(old specs.LinuxHugepageLimit) bool { return old.Pagesize == limit.Pagesize })
		base.HugepageLimits = append(base.HugepageLimits, limit)
	}
	if base.Unified == nil {
		base.Unified = asked.Unified
	}
	maps.Copy(base.Unified, asked.Unified)
	return base
}

func replace[T any](in **T, by *T) {
	if by != nil {
		*in = by
	}
}

// Resources are the limits of a container, at its creation or for an update:
// what is zero in the CRI is not specified. What this machine has no
// controller for is left out.
func Resources(r *runtimeapi.LinuxContainerResources, m machine.Machine) *specs.LinuxResources {
	limits := &specs.LinuxResources{
		CPU: &specs.LinuxCPU{
			Shares: specified(uint64(r.GetCpuShares())),
			Quota:  specified(r.GetCpuQuota()),
			Period: specified(uint64(r.GetCpuPeriod())),
			Cpus:   r.GetCpusetCpus(),
			Mems:   r.GetCpusetMems(),
		},
		Memory:  memory(r),
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, limit := range r.GetHugepageLimits() {
		limits.HugepageLimits = append(limits.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: limit.GetPageSize(), Limit: limit.GetLimit()})
	}
	DropUnsupported(limits, m)
	return limits
}

// memory: the swap limit counts memory and swap together. Without one of its
// own a container with a memory limit gets no swap, as in containerd.
func memory(r *runtimeapi.LinuxContainerResources) *specs.LinuxMemory {
	m := &specs.LinuxMemory{Limit: specified(r.GetMemoryLimitInBytes()), Swap: specified(r.GetMemorySwapLimitInBytes())}
	if m.Swap == nil {
		m.Swap = specified(r.GetMemoryLimitInBytes())
	}
	return m
}

func specified[N int64 | uint64](value N) *N {
	if value == 0 {
		return nil
	}
	return &value
}

// CgroupsPath is the cgroup of a container below the pod's parent, in the
// words of runtime-spec: a path for the driver cgroupfs, slice:prefix:name for
// systemd, which makes the scope prefix-name.scope of it.
func CgroupsPath(parent, prefix, id string, systemd bool) string {
	if systemd {
		return path.Base(parent) + ":" + strings.TrimSuffix(prefix, "-") + ":" + id
	}
	return path.Join("/", parent, prefix+id)
}

// DropUnsupported takes out of the limits of a container what this machine has no
// controller for: the kubelet sends hugepage limits, for one, to every machine. The
// parts CPU and Memory have to be there.
func DropUnsupported(r *specs.LinuxResources, m machine.Machine) {
	has := func(controller string) bool { return slices.Contains(m.Controllers, controller) }
	if !has("cpu") {
		r.CPU.Shares, r.CPU.Quota, r.CPU.Period = nil, nil, nil
	}
	if !has("cpuset") {
		r.CPU.Cpus, r.CPU.Mems = "", ""
	}
	if !has("memory") {
		r.Memory = nil
	} else if !m.Swap {
		r.Memory.Swap = nil
	}
	if !has("pids") {
		r.Pids = nil
	}
	if !has("hugetlb") {
		r.HugepageLimits = nil
	}
}

const (
	kib       = 1 << 10
	unlimited = math.MaxUint64
)

// defaultRlimits are the limits of a container's processes that nothing else sets.
// They are set one and all: what is not set would be inherited from the shell
// that started the daemon. Descriptors are as in systemd's default, because
// programs loop over all that they may have; processes and core files are
// without a limit, as in the units of other runtimes, because processes are
// limited by cgroups; the rest is as the kernel begins with (asm-generic/resource.h).
func defaultRlimits() []specs.POSIXRlimit {
	return []specs.POSIXRlimit{
		{Type: "RLIMIT_AS", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_CORE", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_CPU", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_DATA", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_FSIZE", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_LOCKS", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_MEMLOCK", Soft: 8 * kib * kib, Hard: 8 * kib * kib},
		{Type: "RLIMIT_MSGQUEUE", Soft: 800 * kib, Hard: 800 * kib},
		{Type: "RLIMIT_NICE"},
		{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 512 * kib},
		{Type: "RLIMIT_NPROC", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_RSS", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_RTPRIO"},
		{Type: "RLIMIT_RTTIME", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_STACK", Soft: 8 * kib * kib, Hard: unlimited},
	}
}

// containerRlimits: the configuration's over those of the base spec over the
// usual ones, each as near as this machine allows.
func containerRlimits(c *Container, spec *specs.Spec) error {
	all := defaultRlimits()
	for _, limit := range slices.Concat(spec.Process.Rlimits, c.Defaults.Rlimits) {
		all = slices.DeleteFunc(all, func(other specs.POSIXRlimit) bool { return other.Type == limit.Type })
		all = append(all, limit)
	}
	for i, limit := range all {
		hard := c.Machine.RlimitNear(limit.Type, limit.Hard)
		all[i].Hard, all[i].Soft = hard, min(limit.Soft, hard)
	}
	spec.Process.Rlimits = all
	return nil
}

// StackLimit is the soft limit of the stack of a container's processes, in
// bytes.
func StackLimit(c *Container) (uint64, error) {
	spec, err := c.newSpec()
	if err != nil {
		return 0, err
	}
	err = containerRlimits(c, spec)
	return SoftStack(spec.Process.Rlimits), err
}

// SoftStack is the limit of the stack among the limits of a process, in bytes; no
// limit where none is set.
func SoftStack(limits []specs.POSIXRlimit) uint64 {
	for _, limit := range limits {
		if limit.Type == "RLIMIT_STACK" {
			return limit.Soft
		}
	}
	return unlimited
}

// sandboxSysctls sets the kernel parameters of the pod's namespaces. Unless
// the pod says otherwise, every user of it may bind low ports and send pings,
// as in Docker and containerd; not in a user namespace of its own, where the
// group range could not be written, nor in the node's network.
func sandboxSysctls(s *Sandbox, spec *specs.Spec) error {
	spec.Linux.Sysctl = make(map[string]string)
	if s.NetNS != "" {
		spec.Linux.Sysctl["net.ipv4.ip_unprivileged_port_start"] = "0"
		if s.UserNS == "" {
			spec.Linux.Sysctl["net.ipv4.ping_group_range"] = "0 2147483647"
		}
	}
	for name, value := range s.Defaults.Sysctls {
		if OwnsSysctl(s.Config, name) {
			spec.Linux.Sysctl[SysctlName(name)] = value
		}
	}
	for name, value := range s.Config.GetLinux().GetSysctls() {
		spec.Linux.Sysctl[SysctlName(name)] = value
	}
	return nil
}

// SysctlName is the name with dots. A name may be written with slashes, and a
// dot is then part of an element (sysctl.d(5)): net/ipv4/conf/eth0.1/arp.
func SysctlName(name string) string {
	first := strings.IndexAny(name, "./")
	if first < 0 || name[first] == '.' {
		return name
	}
	swap := strings.NewReplacer(".", "/", "/", ".")
	return swap.Replace(name)
}

// OwnsSysctl reports whether a kernel parameter belongs to a namespace that the
// pod has for itself.
func OwnsSysctl(config *runtimeapi.PodSandboxConfig, name string) bool {
	switch SysctlNamespace(name) {
	case specs.NetworkNamespace:
		return !HostNetwork(config)
	case specs.IPCNamespace:
		return namespaceOptions(config).GetIpc() != runtimeapi.NamespaceMode_NODE
	default:
		return false
	}
}

// SysctlNamespace is the kind of namespace that a kernel parameter belongs to,
// "" if it is one of the node.
func SysctlNamespace(name string) specs.LinuxNamespaceType {
	dotted := SysctlName(name)
	switch {
	case strings.HasPrefix(dotted, "net."):
		return specs.NetworkNamespace
	case strings.HasPrefix(dotted, "fs.mqueue.") || isIPC(dotted):
		return specs.IPCNamespace
	default:
		return ""
	}
}

// isIPC: the kernel parameters of the IPC namespace (ipc_namespaces(7)).
func isIPC(name string) bool {
	switch name {
	case "kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem",
		"kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced":
		return true
	}
	return false
}
