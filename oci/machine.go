package oci

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/apparmor"
)

// Machine is what a spec has to know of the machine that it is for.
type Machine struct {
	// OOMScoreAdj is the daemon's own; without CAP_SYS_RESOURCE no process can
	// get a lower one (proc_pid_oom_score_adj(5)).
	OOMScoreAdj    int
	CanLowerOOMAdj bool
	AppArmor       bool
	SELinux        bool
	// Capabilities are the daemon's own, sorted; nothing that it starts can
	// have others.
	Capabilities []string `json:",omitempty"`
	// Controllers of cgroups are those that are there to be set, sorted;
	// CgroupV2 means version 2 alone, Swap that swap is accounted.
	Controllers []string `json:",omitempty"`
	CgroupV2    bool     `json:",omitempty"`
	Swap        bool     `json:",omitempty"`
	// RecursiveReadOnly: mounts can be made read-only with all below them
	// (mount_setattr(2), Linux 5.12).
	RecursiveReadOnly bool `json:",omitempty"`
	// UserNamespaces: pods can have their own, volumes with mapped owners
	// included (mount_setattr(2) again).
	UserNamespaces bool `json:",omitempty"`
}

// ReadMachine asks the kernel.
func ReadMachine() (Machine, error) {
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
	return Machine{
		OOMScoreAdj:       adjust,
		CanLowerOOMAdj:    own.Get(capability.EFFECTIVE, capability.CAP_SYS_RESOURCE),
		AppArmor:          apparmor.Supported(),
		SELinux:           selinux.GetEnabled(),
		Capabilities:      held(own),
		Controllers:       controllers,
		CgroupV2:          cgroups.IsCgroup2UnifiedMode(),
		Swap:              accountsSwap(),
		RecursiveReadOnly: canSetMountAttributes(),
		UserNamespaces:    canSetMountAttributes() && allowsUserNamespaces(),
	}, nil
}

func held(own capability.Capabilities) []string {
	var names []string
	for _, c := range capability.ListKnown() {
		if own.Get(capability.EFFECTIVE, c) && own.Get(capability.BOUNDING, c) {
			names = append(names, capabilityName(c.String()))
		}
	}
	slices.Sort(names)
	return names
}

// allowsUserNamespaces: the limit may be 0 (user_namespaces(7)).
func allowsUserNamespaces() bool {
	most, err := os.ReadFile("/proc/sys/user/max_user_namespaces")
	return err == nil && strings.TrimSpace(string(most)) != "0"
}

// canSetMountAttributes asks with a call that fails in any case, for want of a
// valid descriptor where the kernel has it.
func canSetMountAttributes() bool {
	err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	return errors.Is(err, unix.EBADF)
}
