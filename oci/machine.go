package oci

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/selinux/go-selinux"
)

// Machine is what a spec has to know of the machine that it is for.
type Machine struct {
	// OOMScoreAdj is the daemon's own; without CAP_SYS_RESOURCE no process can
	// get a lower one (proc_pid_oom_score_adj(5)).
	OOMScoreAdj    int
	CanLowerOOMAdj bool
	AppArmor       bool
	SELinux        bool
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
	enabled, err := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	return Machine{
		OOMScoreAdj:    adjust,
		CanLowerOOMAdj: own.Get(capability.EFFECTIVE, capability.CAP_SYS_RESOURCE),
		AppArmor:       err == nil && strings.HasPrefix(string(enabled), "Y"),
		SELinux:        selinux.GetEnabled(),
	}, nil
}
