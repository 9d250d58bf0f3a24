package oci

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Defaults are what the node's configuration gives to pods and containers that
// do not say otherwise. Its zero value gives nothing.
type Defaults struct {
	// Rlimits are limits of a container's processes by resource; others are as
	// in defaultRlimits.
	Rlimits []specs.POSIXRlimit
	// Env are variables, as NAME=VALUE; image and container have the last word.
	Env []string
	// Sysctls are kernel parameters of pods; those of namespaces that a pod
	// shares with the node are left out.
	Sysctls map[string]string
	// DeviceOwnership gives the devices that a container asks for to its
	// run_as_user and run_as_group.
	DeviceOwnership bool
	// CgroupWritable lets a container write to its own cgroup (version 2).
	CgroupWritable bool
	// PrivilegedWithoutHostDevices: a privileged container may use all devices,
	// and has those that it asks for.
	PrivilegedWithoutHostDevices bool
	// OwnSandbox: the runtime makes a sandbox for each container, so it is not told that
	// it has made one for the pod; and its file system knows no mounts below others.
	OwnSandbox bool
	// PodAnnotations and ContainerAnnotations are patterns (path.Match) of
	// annotations that are passed on in the spec, where hooks find them.
	PodAnnotations, ContainerAnnotations []string
	// Base is what the spec of each container begins with, nil for an empty one.
	Base *specs.Spec
}

// newSpec is the beginning of a container's spec: the base, without what is for
// the container and the CRI to say.
func (c *Container) newSpec() (*specs.Spec, error) {
	spec := &specs.Spec{}
	if base := c.Defaults.Base; base != nil {
		encoded, err := json.Marshal(base)
		if err == nil {
			err = json.Unmarshal(encoded, spec)
		}
		if err != nil {
			return nil, fmt.Errorf("copy the base spec: %w", err)
		}
	}
	if spec.Process == nil {
		spec.Process = &specs.Process{}
	}
	if spec.Linux == nil {
		spec.Linux = &specs.Linux{}
	}
	spec.Version = specs.Version
	spec.Root = &specs.Root{Path: c.Rootfs, Readonly: c.security().GetReadonlyRootfs()}
	spec.Hostname, spec.Domainname = "", ""
	spec.Process.ApparmorProfile, spec.Process.SelinuxLabel = "", ""
	spec.Linux.Seccomp, spec.Linux.MountLabel, spec.Linux.RootfsPropagation = nil, "", ""
	spec.Linux.CgroupsPath = c.CgroupsPath
	if spec.Annotations == nil {
		spec.Annotations = make(map[string]string)
	}
	maps.Copy(spec.Annotations, matching(c.Pod.GetAnnotations(), c.Defaults.PodAnnotations))
	maps.Copy(spec.Annotations, matching(c.Config.GetAnnotations(), c.Defaults.ContainerAnnotations))
	maps.Copy(spec.Annotations, containerAnnotations(c))
	return spec, nil
}

// matching are the annotations whose names match one of the patterns.
func matching(annotations map[string]string, patterns []string) map[string]string {
	matched := make(map[string]string)
	for name, value := range annotations {
		for _, pattern := range patterns {
			if ok, err := path.Match(pattern, name); err == nil && ok {
				matched[name] = value
			}
		}
	}
	return matched
}
