package oci

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
)

// containerResources lays the container's resources over the base spec's, as JSON does; lists are replaced.
func containerResources(c *Container, spec *specs.Spec) error {
	limits := Resources(c.Config.GetLinux().GetResources(), c.Machine)
	if base := spec.Linux.Resources; base != nil {
		pages := slices.DeleteFunc(base.HugepageLimits, func(old specs.LinuxHugepageLimit) bool {
			return slices.ContainsFunc(limits.HugepageLimits, func(l specs.LinuxHugepageLimit) bool { return l.Pagesize == old.Pagesize })
		})
		base.HugepageLimits = nil
		if base.Memory == nil {
			base.Memory = &specs.LinuxMemory{}
		}
		encoded, err := json.Marshal(limits)
		if err == nil {
			err = json.Unmarshal(encoded, base)
		}
		if err != nil {
			return fmt.Errorf("read the resources of the base spec: %w", err)
		}
		base.HugepageLimits = append(pages, base.HugepageLimits...)
		limits = base
		DropUnsupported(limits, c.Machine)
	}
	if c.PidsLimit > 0 && slices.Contains(c.Machine.Controllers, "pids") {
		limits.Pids = &specs.LinuxPids{Limit: &c.PidsLimit}
	}
	if c.Defaults.CgroupWritable && c.Machine.CgroupV2 && !c.security().GetPrivileged() {
		// A node has 65,535 with a limit of memory, and a path that is longer than PATH_MAX is removed by nobody.
		own := map[string]string{"cgroup.max.descendants": "1024", "cgroup.max.depth": "12"}
		maps.Copy(own, limits.Unified)
		limits.Unified = own
	}
	spec.Linux.Resources = limits
	return nil
}

// Resources returns the limits that this machine has controllers for. Zero in the CRI is no limit. Swap
// counts memory and swap together: as in containerd, a memory limit alone allows no swap.
func Resources(r *runtimeapi.LinuxContainerResources, m machine.Machine) *specs.LinuxResources {
	limits := &specs.LinuxResources{
		CPU: &specs.LinuxCPU{
			Shares: specified(uint64(r.GetCpuShares())), Quota: specified(r.GetCpuQuota()),
			Period: specified(uint64(r.GetCpuPeriod())), Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems(),
		},
		Memory: &specs.LinuxMemory{
			Limit: specified(r.GetMemoryLimitInBytes()),
			Swap:  specified(cmp.Or(r.GetMemorySwapLimitInBytes(), r.GetMemoryLimitInBytes())),
		},
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, limit := range r.GetHugepageLimits() {
		limits.HugepageLimits = append(limits.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: limit.GetPageSize(), Limit: limit.GetLimit()})
	}
	DropUnsupported(limits, m)
	return limits
}

func specified[N int64 | uint64](value N) *N {
	if value == 0 {
		return nil
	}
	return &value
}

// CgroupsPath returns a path, or slice:prefix:name, from which systemd makes prefix-name.scope (runtime-spec). Both
// forms are containerd's: agents know them (docs/agents.md).
func CgroupsPath(parent, id string, systemd bool) string {
	if systemd {
		return path.Base(parent) + ":" + node.ScopePrefix + ":" + id
	}
	return path.Join("/", parent, id)
}

// DropUnsupported drops limits that have no controller here. CPU and Memory must not be nil.
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

const unlimited = math.MaxUint64

// defaultRlimits sets all limits, or they would come from the shell that started the daemon. Descriptors are
// as in systemd, because programs loop over all they may have. Cgroups limit processes. The rest is the
// kernel's default (asm-generic/resource.h).
func defaultRlimits() []specs.POSIXRlimit {
	return []specs.POSIXRlimit{
		{Type: "RLIMIT_AS", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_CORE", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_CPU", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_DATA", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_FSIZE", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_LOCKS", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_MEMLOCK", Soft: 8 << 20, Hard: 8 << 20},
		{Type: "RLIMIT_MSGQUEUE", Soft: 800 << 10, Hard: 800 << 10},
		{Type: "RLIMIT_NICE"},
		{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 512 << 10},
		{Type: "RLIMIT_NPROC", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_RSS", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_RTPRIO"},
		{Type: "RLIMIT_RTTIME", Soft: unlimited, Hard: unlimited},
		{Type: "RLIMIT_STACK", Soft: 8 << 20, Hard: unlimited},
	}
}

// containerRlimits prefers the configuration's limits to the base spec's, within those of the machine.
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

// softStack returns the limit of the stack in bytes.
func softStack(limits []specs.POSIXRlimit) uint64 {
	for _, limit := range limits {
		if limit.Type == "RLIMIT_STACK" {
			return limit.Soft
		}
	}
	return unlimited
}

// SysctlName returns the name with dots. With slashes, a dot is part of an element (sysctl.d(5)):
// net/ipv4/conf/eth0.1/arp.
func SysctlName(name string) string {
	if first := strings.IndexAny(name, "./"); first < 0 || name[first] == '.' {
		return name
	}
	return strings.NewReplacer(".", "/", "/", ".").Replace(name)
}

// OwnsSysctl reports whether a kernel parameter belongs to a namespace of the pod's own.
func OwnsSysctl(config *runtimeapi.PodSandboxConfig, name string) bool {
	switch SysctlNamespace(name) {
	case specs.NetworkNamespace:
		return !HostNetwork(config)
	case specs.IPCNamespace:
		return namespaceOptions(config).GetIpc() != runtimeapi.NamespaceMode_NODE
	case specs.UTSNamespace: // see Sandbox.namespaces
		return !HostNetwork(config)
	case specs.UserNamespace:
		return UserNamespace(config) != nil
	default:
		return false
	}
}

// ipcSysctls are the parameters of the IPC namespace (ipc_namespaces(7)).
var ipcSysctls = []string{
	"kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem",
	"kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced",
}

// SysctlNamespace is the kind of namespace of a kernel parameter, "" for the node's.
func SysctlNamespace(name string) specs.LinuxNamespaceType {
	dotted := SysctlName(name)
	switch {
	case strings.HasPrefix(dotted, "net."):
		return specs.NetworkNamespace
	case strings.HasPrefix(dotted, "fs.mqueue.") || slices.Contains(ipcSysctls, dotted):
		return specs.IPCNamespace
	case dotted == domainName:
		return specs.UTSNamespace
	case strings.HasPrefix(dotted, "user."):
		return specs.UserNamespace
	default:
		return ""
	}
}

// NetworkSysctl is a parameter of a network namespace, by its path below /proc/sys.
type NetworkSysctl struct{ Path, Value string }

// TakeNetworkSysctls removes the parameters of the network namespace from a spec and returns them in the order in which
// they have to be written: forwarding resets those of interfaces (ip-sysctl.rst), and those of all interfaces
// overwrite those of single ones. Runtimes write a spec's parameters in any order.
func TakeNetworkSysctls(spec *specs.Spec) (all []NetworkSysctl) {
	rank := func(s NetworkSysctl) int {
		switch {
		case s.Path == "net/ipv4/ip_forward" || strings.HasSuffix(s.Path, "/conf/all/forwarding"):
			return 0
		case strings.Contains(s.Path, "/conf/all/"):
			return 1
		case strings.Contains(s.Path, "/conf/default/"):
			return 2
		}
		return 3
	}
	for name, value := range spec.Linux.Sysctl {
		if SysctlNamespace(name) == specs.NetworkNamespace {
			all = append(all, NetworkSysctl{strings.NewReplacer(".", "/", "/", ".").Replace(name), value})
			delete(spec.Linux.Sysctl, name)
		}
	}
	slices.SortFunc(all, func(a, b NetworkSysctl) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), strings.Compare(a.Path, b.Path))
	})
	return all
}
