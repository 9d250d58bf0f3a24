package oci

import "github.com/opencontainers/runtime-spec/specs-go"

// sandboxMounts gives pause its own /proc, which setting sysctls needs, and
// nothing else: an empty directory over /dev keeps the runtime from making
// unused device nodes. Other runtimes than libcontainer do not start without
// /dev/null.
func sandboxMounts(s *Sandbox, spec *specs.Spec) error {
	spec.Mounts = []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "bind", Source: s.EmptyDir, Options: []string{"bind", "ro", "nosuid", "noexec", "nodev"}},
	}
	if s.OwnDevices {
		spec.Mounts[1] = specs.Mount{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "mode=755", "size=64k"}}
	}
	return nil
}
