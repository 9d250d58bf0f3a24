package oci

import (
	"fmt"
	"path"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// pauseCPUShares is the least weight there is: pause only sleeps.
const pauseCPUShares = 2

func sandboxResources(_ *Sandbox, spec *specs.Spec) error {
	shares := uint64(pauseCPUShares)
	spec.Linux.Resources = &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}}
	return nil
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

// CheckCgroupParent tells why a cgroup parent cannot be used with the driver.
func CheckCgroupParent(parent string, systemd bool) error {
	for _, element := range strings.Split(parent, "/") {
		if element == ".." {
			return fmt.Errorf("%q has an element '..'", parent)
		}
	}
	if strings.ContainsAny(parent, "\x00:") {
		return fmt.Errorf("%q has a character that a cgroup parent cannot have", parent)
	}
	if systemd && parent != "" && !strings.HasSuffix(path.Base(parent), ".slice") {
		return fmt.Errorf("%q is not a slice, but the cgroup driver is systemd: kubelet and runtime have to use the same driver", parent)
	}
	return nil
}
