package oci

import (
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// DefaultCapabilities are those of a container that asks for none, the same as
// in Docker and containerd.
func DefaultCapabilities() []string {
	return []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
		"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	}
}

// AllCapabilities stands for all that there are, in a list of capabilities.
const AllCapabilities = "ALL"

// containerCapabilities: "all" means all that the daemon has, others could not
// be given. The inheritable set holds the ambient capabilities alone, which
// need it: what else is in it, a file's inheritable capabilities would give to
// users that are not root (CVE-2022-24769).
func containerCapabilities(c *Container, spec *specs.Spec) error {
	spec.Process.Capabilities = &specs.LinuxCapabilities{}
	if c.security().GetPrivileged() {
		setCapabilities(spec, c.Machine.Capabilities)
		return nil
	}
	asked := c.security().GetCapabilities()
	ambient, drop := CapabilityNames(asked.GetAddAmbientCapabilities()), CapabilityNames(asked.GetDropCapabilities())
	add := slices.Concat(CapabilityNames(asked.GetAddCapabilities()), ambient)
	set := baseCapabilities(add, drop)
	if slices.Contains(set, AllCapabilities) {
		set = slices.Clone(c.Machine.Capabilities)
	}
	set = slices.DeleteFunc(append(set, add...), func(name string) bool {
		return slices.Contains(drop, name) || !slices.Contains(c.Machine.Capabilities, name)
	})
	setCapabilities(spec, set)
	spec.Process.Capabilities.Ambient = onlyIn(spec.Process.Capabilities.Bounding, ambient)
	spec.Process.Capabilities.Inheritable = spec.Process.Capabilities.Ambient
	return nil
}

// baseCapabilities is what single capabilities are added to and dropped from:
// dropping all is stronger than adding all.
func baseCapabilities(add, drop []string) []string {
	switch {
	case slices.Contains(drop, AllCapabilities):
		return nil
	case slices.Contains(add, AllCapabilities):
		return []string{AllCapabilities}
	default:
		return DefaultCapabilities()
	}
}

// onlyIn is the set of the wanted capabilities, "all" resolved, that are there.
func onlyIn(there, wanted []string) []string {
	return slices.DeleteFunc(slices.Clone(there), func(name string) bool {
		return !slices.Contains(wanted, name) && !slices.Contains(wanted, AllCapabilities)
	})
}

func setCapabilities(spec *specs.Spec, names []string) {
	sorted := slices.Compact(slices.Sorted(slices.Values(names)))
	spec.Process.Capabilities.Bounding = sorted
	spec.Process.Capabilities.Effective = sorted
	spec.Process.Capabilities.Permitted = sorted
}

// CapabilityNames are the names as runtime-spec has them: Kubernetes writes
// them without CAP_, and neither cares for the case of letters.
func CapabilityNames(names []string) []string {
	var full []string
	for _, name := range names {
		full = append(full, capabilityName(name))
	}
	return full
}

func capabilityName(name string) string {
	name = strings.ToUpper(name)
	if name == AllCapabilities || strings.HasPrefix(name, "CAP_") {
		return name
	}
	return "CAP_" + name
}
