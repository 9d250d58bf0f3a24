package container

import (
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
)

// adjust lets plugins change the spec, and checks the result as the request was checked.
func (c *creation) adjust(ctx context.Context) error {
	before := slices.Clone(c.spec.Mounts)
	changes, err := c.owner.options.Plugins.Create(ctx, c.sandbox, c.Container, c.spec, c.injectDevices)
	if err != nil {
		return err
	}
	err = errors.Join(c.checkResources(), c.checkMounts(ctx, before), c.takeCgroup())
	if err != nil {
		return fmt.Errorf("what NRI plugins have made of the container: %w", err)
	}
	c.owner.applyChanges(ctx, changes)
	return c.storeSpec(ctx)
}

func (c *creation) injectDevices(spec *specs.Spec, names []string) error {
	cache, err := c.owner.cdiDevices()
	if err != nil {
		return err
	}
	if _, err := cache.InjectDevices(spec, oci.Once(names)...); err != nil {
		return fmt.Errorf("CDI devices %q: %w", names, err)
	}
	return nil
}

// checkResources refuses limits that make no sense and drops those that this machine cannot set.
func (c *creation) checkResources() error {
	machine, limits := c.owner.options.Machine, c.spec.Linux.Resources
	if limits.CPU == nil {
		limits.CPU = &specs.LinuxCPU{}
	}
	if limits.Memory == nil {
		limits.Memory = &specs.LinuxMemory{}
	}
	oci.DropUnsupported(limits, machine)
	score := c.spec.Process.OOMScoreAdj
	if err := validate.InForce("linux.resources.", inForce(limits, *score), machine); err != nil {
		return err
	}
	*score = machine.OOMScoreAdjNear(*score)
	var last []specs.POSIXRlimit // plugins append, and a spec must not have two of a kind
	for _, limit := range c.spec.Process.Rlimits {
		if limit.Soft > limit.Hard {
			return fmt.Errorf("rlimit %s: the soft limit %d is higher than the hard one, %d: %w", limit.Type, limit.Soft, limit.Hard, errdefs.ErrInvalidArgument)
		}
		last = append(slices.DeleteFunc(last, func(other specs.POSIXRlimit) bool { return other.Type == limit.Type }), limit)
	}
	c.spec.Process.Rlimits = last
	return nil
}

// checkMounts checks new mounts. It awaits, makes and resolves their sources as it does the kubelet's.
func (c *creation) checkMounts(ctx context.Context, before []specs.Mount) error {
	for i := range c.spec.Mounts {
		m := &c.spec.Mounts[i]
		if slices.ContainsFunc(before, func(old specs.Mount) bool { return reflect.DeepEqual(old, *m) }) {
			continue
		}
		if err := c.checkMount(ctx, m); err != nil {
			return fmt.Errorf("mount %s: %w", m.Destination, err)
		}
	}
	return nil
}

func (c *creation) checkMount(ctx context.Context, m *specs.Mount) error {
	source := m.Source
	bound := m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
	if !bound {
		source = "" // a name, such as tmpfs
	} else if source == "" {
		return fmt.Errorf("source: is missing: %w", errdefs.ErrInvalidArgument)
	}
	if err := validate.Mount(m.Destination, source); err != nil {
		return err
	}
	if m.Destination = path.Clean(m.Destination); !bound {
		return nil
	}
	if err := c.owner.awaitHostPath(ctx, m.Destination, m.Source); err != nil {
		return err
	}
	if err := makeSource(m.Source, c.parts.Pod.GetMetadata().GetUid()); err != nil {
		return fmt.Errorf("the source: %w", err)
	}
	source, err := filepath.EvalSymlinks(m.Source)
	m.Source = source
	return err
}

// takeCgroup checks and records a plugin's cgroup. It must be new: it is emptied with the container.
func (c *creation) takeCgroup() error {
	wanted := c.spec.Linux.CgroupsPath
	if wanted == c.CgroupsPath {
		return nil
	}
	if c.owner.options.SystemdCgroup {
		if parts := strings.Split(wanted, ":"); len(parts) != 3 || !strings.HasSuffix(parts[0], ".slice") || parts[2] == "" || strings.Contains(wanted, "/") {
			return fmt.Errorf("linux.cgroups_path: %q is not of the form slice:prefix:name: %w", wanted, errdefs.ErrInvalidArgument)
		}
	} else if !path.IsAbs(wanted) || path.Clean(wanted) != wanted || wanted == "/" {
		return fmt.Errorf("linux.cgroups_path: %q is not the absolute path of a cgroup: %w", wanted, errdefs.ErrInvalidArgument)
	}
	if err := validate.CgroupName(wanted); err != nil {
		return fmt.Errorf("linux.cgroups_path: %w", err)
	}
	if c.owner.options.Hierarchies.Exists(cgroup.Path(wanted)) {
		return fmt.Errorf("linux.cgroups_path: the cgroup %s is there already, a container needs one of its own: %w", wanted, errdefs.ErrAlreadyExists)
	}
	c.CgroupsPath, c.parts.CgroupsPath = wanted, wanted
	if err := c.owner.options.Node.Know(cgroup.Path(wanted)); err != nil {
		return err
	}
	return c.owner.files.Records.Write(c.ID, c.Record)
}
