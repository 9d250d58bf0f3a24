package validate

import (
	"fmt"
	"path"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

func (c *container) mounts() {
	for i, m := range c.config.GetMounts() {
		field := fmt.Sprintf("config.mounts[%d].", i)
		c.mountPoint(field+"container_path", m.GetContainerPath())
		c.mountSource(field, m)
		c.relabel(field+"selinux_relabel", m)
		if _, known := runtimeapi.MountPropagation_name[int32(m.GetPropagation())]; !known {
			c.bad(field+"propagation", "%d is unknown", m.GetPropagation())
		}
		c.recursiveReadOnly(field+"recursive_read_only", m)
		c.mountOptions(field+"mount_options", m.GetMountOptions())
		c.mountMappings(field, m)
	}
}

// Mount reports what is wrong with the places of a mount that does not come from
// a request; source is empty for one that has none on the node.
func Mount(destination, source string) error {
	p := &problems{}
	p.mountPoint("destination", destination)
	if source != "" {
		p.absolute("source", source)
	}
	return p.err()
}

func (p *problems) mountPoint(field, at string) {
	p.absolute(field, at)
	if path.Clean(at) == "/" {
		p.bad(field, "is the root of the container")
	}
}

// mountSource is a path or an image.
func (c *container) mountSource(field string, m *runtimeapi.Mount) {
	switch {
	case m.GetImage() == nil:
		// In a pod that has an image volume, the kubelet (1.36, makeMounts) sends
		// image_sub_path for the other volumes' sub paths as well. Those are in
		// host_path already.
		c.absolute(field+"host_path", m.GetHostPath())
	case m.GetImage().GetImage() == "":
		c.bad(field+"image", "has no name")
	case m.GetHostPath() != "":
		c.bad(field+"host_path", "is set, and so is an image")
	case !m.GetReadonly():
		c.bad(field+"readonly", "is false, but an image can only be mounted read-only")
	}
}

// relabel: the labels of some directories are the node's.
func (c *container) relabel(field string, m *runtimeapi.Mount) {
	if !m.GetSelinuxRelabel() || !c.machine.SELinux || m.GetImage() != nil {
		return
	}
	if err := machine.CheckRelabel(m.GetHostPath()); err != nil {
		c.bad(field, "%w", err)
	}
}

func (c *container) recursiveReadOnly(field string, m *runtimeapi.Mount) {
	switch {
	case !m.GetRecursiveReadOnly():
	case !m.GetReadonly():
		c.bad(field, "is set without readonly")
	case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
		c.bad(field, "is set with the propagation %v, only PRIVATE is possible", m.GetPropagation())
	case !c.machine.RecursiveReadOnly:
		c.bad(field, "needs Linux 5.12")
	}
}

// mountOptions can only take away: those that would give, or change what other
// fields say, are refused.
func (c *container) mountOptions(field string, options []string) {
	possible := []string{"noexec", "nodev", "nosuid", "nosymfollow", "noatime", "nodiratime"}
	for i, option := range options {
		if !slices.Contains(possible, option) {
			c.bad(fmt.Sprintf("%s[%d]", field, i), "%q is not one of %q", option, possible)
		}
	}
}

// mountMappings map the ids of the mounted files (mount_setattr(2)).
func (c *container) mountMappings(field string, m *runtimeapi.Mount) {
	if (len(m.GetUidMappings()) == 0) != (len(m.GetGidMappings()) == 0) {
		c.bad(field+"uidMappings", "uidMappings and gidMappings go together")
	}
	c.idRanges(field+"uidMappings", m.GetUidMappings())
	c.idRanges(field+"gidMappings", m.GetGidMappings())
}
