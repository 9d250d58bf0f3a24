package oci

import (
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/machine"
)

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
