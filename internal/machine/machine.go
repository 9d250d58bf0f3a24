// Package machine knows what this machine can do: features of its kernel, asked
// of the kernel and not taken from its version; capabilities of the daemon,
// controllers of cgroups, SELinux, and AppArmor with the default profile, which
// the kernel keeps once it is loaded. What is read stays so until the machine is
// booted again, so there is no state here, and no lock.
package machine

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/selinux/go-selinux"
)

// Machine is what specs and checks have to know of the machine they are for.
type Machine struct {
	// OOMScoreAdj is the daemon's own; without CAP_SYS_RESOURCE no process can
	// get a lower one (proc_pid_oom_score_adj(5)).
	OOMScoreAdj    int
	CanLowerOOMAdj bool
	AppArmor       bool
	SELinux        bool
	// SELinuxProblem says why SELinux cannot confine containers, "" if it can or
	// there is none.
	SELinuxProblem string `json:",omitempty"`
	// Capabilities are the daemon's own, sorted; nothing that it starts can
	// have others.
	Capabilities []string `json:",omitempty"`
	// Controllers of cgroups are those that are there to be set, sorted;
	// CgroupV2 means version 2 alone, Swap that swap is accounted.
	Controllers []string `json:",omitempty"`
	CgroupV2    bool     `json:",omitempty"`
	Swap        bool     `json:",omitempty"`
	// CgroupDelegation: a cgroup namespace bounds what is done in it (cgroups(7),
	// nsdelegate).
	CgroupDelegation bool `json:",omitempty"`
	// Rlimits are the daemon's own hard limits by name ("RLIMIT_NOFILE"); nil
	// with CAP_SYS_RESOURCE, with which processes may have higher ones.
	Rlimits map[string]uint64 `json:",omitempty"`
	// CPUs and MemoryNodes bound the numbers of those that the kernel can have; 0
	// where they are not known.
	CPUs        uint64 `json:",omitempty"`
	MemoryNodes uint64 `json:",omitempty"`
	// HugepageSizes are those of the kernel, sorted, in the form that the files of
	// the controller hugetlb have ("2MB"); none where they are not known.
	HugepageSizes []string `json:",omitempty"`
	// RecursiveReadOnly and UserNamespaces are the features of these names (see
	// Features).
	RecursiveReadOnly bool `json:",omitempty"`
	UserNamespaces    bool `json:",omitempty"`
}

// Read asks the kernel. root is a directory in the file system of images.
func Read(root string) (Machine, error) {
	text, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return Machine{}, err
	}
	adjust, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return Machine{}, fmt.Errorf("read our own oom_score_adj: %w", err)
	}
	own, err := capability.NewPid2(0)
	if err != nil {
		return Machine{}, err
	}
	if err := own.Load(); err != nil {
		return Machine{}, fmt.Errorf("read our own capabilities: %w", err)
	}
	controllers, err := readControllers()
	if err != nil {
		return Machine{}, fmt.Errorf("find the controllers of cgroups: %w", err)
	}
	m := Machine{
		OOMScoreAdj:       adjust,
		CanLowerOOMAdj:    own.Get(capability.EFFECTIVE, capability.CAP_SYS_RESOURCE),
		AppArmor:          appArmorSupported(),
		SELinux:           selinux.GetEnabled(),
		Capabilities:      held(own),
		Controllers:       controllers,
		CgroupV2:          cgroups.IsCgroup2UnifiedMode(),
		Swap:              accountsSwap(),
		CgroupDelegation:  delegates(),
		CPUs:              count("/sys/devices/system/cpu/possible"),
		MemoryNodes:       count("/sys/devices/system/node/possible"),
		HugepageSizes:     slices.Sorted(slices.Values(cgroups.HugePageSizes())),
		RecursiveReadOnly: probeRecursiveReadOnly() == nil,
		UserNamespaces:    probeUserNamespaces(root) == nil,
	}
	if m.SELinux {
		if err := checkSELinuxPolicy(); err != nil {
			m.SELinuxProblem = err.Error()
		}
	}
	if !m.CanLowerOOMAdj {
		m.Rlimits, err = hardLimits()
	}
	return m, err
}

func held(own capability.Capabilities) []string {
	var names []string
	for _, c := range capability.ListKnown() {
		if own.Get(capability.EFFECTIVE, c) && own.Get(capability.BOUNDING, c) {
			names = append(names, "CAP_"+strings.ToUpper(c.String()))
		}
	}
	slices.Sort(names)
	return names
}

// OOMScoreAdjNear is the value nearest to the wanted one that a process of
// this machine may have.
func (m Machine) OOMScoreAdjNear(wanted int) int {
	if m.CanLowerOOMAdj {
		return wanted
	}
	return max(wanted, m.OOMScoreAdj)
}
