package oci

import (
	"math"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

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
