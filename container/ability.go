package container

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/handler"
)

// checkAbility refuses a spec with what the handler's runtime does not say that it
// can do, and would pass over without a word: a mount that is writable all the same,
// a network device that stays where it is.
func checkAbility(spec *specs.Spec, runtime handler.Status) error {
	refuse := func(what, field string) error {
		return fmt.Errorf("the runtime of handler %q does not say that it can %s (%s): use a handler whose runtime can, or do without: %w",
			runtime.Name, what, field, errdefs.ErrInvalidArgument)
	}
	can := runtime.Features
	for _, m := range spec.Mounts {
		if slices.Contains(m.Options, "rro") && !can.RecursiveReadOnlyMounts {
			return refuse("make the mounts below "+m.Destination+" read-only", "recursive_read_only")
		}
	}
	if runtime.OwnSandbox {
		if kind := shared(spec.Linux.Namespaces); kind != "" {
			return fmt.Errorf("handler %q makes a sandbox for each container, which shares no %s namespace with others (sandbox_per_container): %w", runtime.Name, kind, errdefs.ErrInvalidArgument)
		}
	}
	switch {
	case len(spec.Linux.NetDevices) > 0 && !can.NetDevices:
		return refuse("move network devices", "linux.netDevices")
	case spec.Linux.MemoryPolicy != nil && !can.MemoryPolicy:
		return refuse("set a memory policy", "linux.memoryPolicy")
	default:
		return nil
	}
}

// shared is the kind of a namespace that a sandbox of the container's own would not
// share, although the container asks for it: that of another's processes, the node's
// processes or its IPC.
func shared(namespaces []specs.LinuxNamespace) specs.LinuxNamespaceType {
	find := func(kind specs.LinuxNamespaceType) int {
		return slices.IndexFunc(namespaces, func(n specs.LinuxNamespace) bool { return n.Type == kind })
	}
	if at := find(specs.PIDNamespace); at < 0 || namespaces[at].Path != "" {
		return specs.PIDNamespace
	}
	if find(specs.IPCNamespace) < 0 {
		return specs.IPCNamespace
	}
	return ""
}
