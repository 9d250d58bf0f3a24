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
	switch {
	case len(spec.Linux.NetDevices) > 0 && !can.NetDevices:
		return refuse("move network devices", "linux.netDevices")
	case spec.Linux.MemoryPolicy != nil && !can.MemoryPolicy:
		return refuse("set a memory policy", "linux.memoryPolicy")
	default:
		return nil
	}
}
