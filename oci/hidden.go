package oci

import (
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// containerHiddenPaths hides parts of /proc and /sys that show the node or change it.
// The CRI does not distinguish an empty list from none, so an empty one is the default
// one, as in containerd. The kubelet asks for no list at all where
// procMount is Unmasked, which Kubernetes allows with a user namespace alone:
// there two empty lists hide nothing. A privileged container sees all.
func containerHiddenPaths(c *Container, spec *specs.Spec) error {
	defaultMasked, defaultReadonly := hiddenByDefault(spec.Linux)
	spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths = nil, nil
	if c.security().GetPrivileged() {
		return nil
	}
	masked, readonly := c.security().GetMaskedPaths(), c.security().GetReadonlyPaths()
	unmasked := c.security() != nil && len(masked)+len(readonly) == 0 && UserNamespace(c.Pod) != nil
	if len(masked) == 0 && !unmasked {
		masked = defaultMasked
	}
	if len(readonly) == 0 && !unmasked {
		readonly = defaultReadonly
	}
	spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths = masked, readonly
	if !c.Machine.CgroupV2 && mountsHave(spec, cgroupRoot) {
		// On version 1 it is a tmpfs with links and the hierarchies, which are
		// read-only themselves.
		spec.Linux.ReadonlyPaths = append(slices.Clone(readonly), cgroupRoot)
	}
	return nil
}

func mountsHave(spec *specs.Spec, place string) bool {
	return slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == place && m.Type == "cgroup" })
}

// hiddenByDefault are the lists of the base spec, or those of the kubelet
// (procMount: Default).
func hiddenByDefault(base *specs.Linux) (masked, readonly []string) {
	masked, readonly = base.MaskedPaths, base.ReadonlyPaths
	if masked == nil {
		masked = []string{
			"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
			"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
			"/sys/devices/virtual/powercap",
		}
	}
	if readonly == nil {
		readonly = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
	}
	return masked, readonly
}
