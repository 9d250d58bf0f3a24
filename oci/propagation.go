package oci

import (
	"fmt"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// propagate is the mount option for a propagation (mount_namespaces(7)). What
// is to come from the host needs a source in a peer group, and a container
// whose root receives; what is to go there needs one that sends.
func propagate(source string, mode runtimeapi.MountPropagation, spec *specs.Spec) (string, error) {
	switch mode {
	case runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		if err := wantPeers(source, "shared:", "master:"); err != nil {
			return "", err
		}
		if spec.Linux.RootfsPropagation == "" {
			spec.Linux.RootfsPropagation = "rslave"
		}
		return "rslave", nil
	case runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		if err := wantPeers(source, "shared:"); err != nil {
			return "", err
		}
		spec.Linux.RootfsPropagation = "rshared"
		return "rshared", nil
	default:
		return "rprivate", nil
	}
}

// wantPeers: the mount that holds the path has one of the marks of a peer group
// (proc_pid_mountinfo(5), optional fields).
func wantPeers(source string, marks ...string) error {
	holder, err := mountOf(source)
	if err != nil {
		return err
	}
	for field := range strings.FieldsSeq(holder.Optional) {
		for _, mark := range marks {
			if strings.HasPrefix(field, mark) {
				return nil
			}
		}
	}
	return fmt.Errorf("%s is on the mount %s, which is private and propagates nothing: run 'mount --make-rshared %s' on the node, or ask for no propagation",
		source, holder.Mountpoint, holder.Mountpoint)
}

// mountOf is the mount that a path, without symbolic links, is on: of those
// above it the deepest, and of several in one place the last, which is on top.
func mountOf(source string) (*mountinfo.Info, error) {
	above, err := mountinfo.GetMounts(mountinfo.ParentsFilter(source))
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	var deepest *mountinfo.Info
	for _, m := range above {
		if deepest == nil || len(m.Mountpoint) >= len(deepest.Mountpoint) {
			deepest = m
		}
	}
	if deepest == nil {
		return nil, fmt.Errorf("%s is on no mount that can be seen from here", source)
	}
	return deepest, nil
}
