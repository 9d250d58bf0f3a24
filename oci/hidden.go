package oci

import "github.com/opencontainers/runtime-spec/specs-go"

// containerHiddenPaths hides parts of /proc and /sys that tell about the node
// or change it. The CRI lists them, and cannot tell an empty list, with which
// all is to be seen, from none; so only a container without any security
// context gets the usual ones. A privileged one sees all.
func containerHiddenPaths(c *Container, spec *specs.Spec) error {
	switch {
	case c.security() == nil:
		spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths = usuallyMasked(), usuallyReadonly()
	case !c.security().GetPrivileged():
		spec.Linux.MaskedPaths = c.security().GetMaskedPaths()
		spec.Linux.ReadonlyPaths = c.security().GetReadonlyPaths()
	}
	return nil
}

// The lists of the kubelet (procMount: Default).
func usuallyMasked() []string {
	return []string{
		"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
		"/sys/devices/virtual/powercap",
	}
}

func usuallyReadonly() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}
