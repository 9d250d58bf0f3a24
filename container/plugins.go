package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"reflect"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
)

// Plugins take part in the lives of containers (package nri). Each call ends, by its own limits or with
// its context. Errors of Create, Start and Update refuse the operation; others are only logged.
type Plugins interface {
	// Enabled reports whether there may be plugins. If not, nothing else is called; later ones get all that exist.
	Enabled() bool
	// Create adjusts the spec; inject adds CDI devices to it. It returns changes for other containers.
	Create(ctx context.Context, pod *sandbox.Sandbox, c *Container, spec *specs.Spec, inject Inject) ([]Change, error)
	Created(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	Start(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	Started(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	// Update returns the resources to set instead of those asked for, and changes for other containers.
	Update(ctx context.Context, pod *sandbox.Sandbox, c *Container, asked *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, []Change, error)
	Updated(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	// Stop is called once after the end, however that came; Remove is called before the removal.
	Stop(ctx context.Context, pod *sandbox.Sandbox, c *Container) ([]Change, error)
	Remove(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
}

// Inject adds CDI devices to a spec.
type Inject func(spec *specs.Spec, devices []string) error

// Change is what a plugin wants to change of a container's resources.
type Change struct {
	ID        string
	Plugins   []string // those that wanted changes
	Resources *runtimeapi.LinuxContainerResources
	Optional  bool // the plugin expects that it may be impossible
}

func (s *Store) hasPlugins() bool { return s.options.Plugins != nil && s.options.Plugins.Enabled() }

// applyChanges changes other containers for plugins, under no lock of a visible one, and logs failures.
func (s *Store) applyChanges(ctx context.Context, changes []Change) {
	for _, change := range changes {
		err := s.UpdateUnsolicited(ctx, change.ID, change.Resources)
		if err == nil {
			continue
		}
		level := slog.LevelWarn
		if change.Optional {
			level = slog.LevelInfo
		}
		s.options.Logger.Log(ctx, level, "a change that an NRI plugin wanted for another container was not made",
			"id", change.ID, "plugins", change.Plugins, "err", err)
	}
}

func (s *Store) ask(ctx context.Context, c *Container, question func(Plugins, context.Context, *sandbox.Sandbox, *Container) error) error {
	pod, err := s.options.Sandboxes.Find(c.SandboxID)
	if err != nil {
		return err
	}
	return question(s.options.Plugins, ctx, pod, c)
}

// askUpdate returns what the plugins make of requested resources.
func (s *Store) askUpdate(ctx context.Context, c *Container, asked *runtimeapi.LinuxContainerResources) (_ *runtimeapi.LinuxContainerResources, others []Change, err error) {
	if !s.hasPlugins() {
		return asked, nil, nil
	}
	err = s.begin(ctx, c).Do(stepNRIUpdate, func(ctx context.Context) error {
		return s.ask(ctx, c, func(p Plugins, ctx context.Context, pod *sandbox.Sandbox, c *Container) (err error) {
			asked, others, err = p.Update(ctx, pod, c, asked)
			return err
		})
	})
	return asked, others, err
}

// announce notifies the plugins of an operation on a container; an error is only logged.
func (s *Store) announce(steps *step.Sequence, c *Container, name step.Name, notify func(Plugins, context.Context, *sandbox.Sandbox, *Container) error) {
	if !s.hasPlugins() || steps.Err() != nil {
		return
	}
	err := steps.Do(name, func(ctx context.Context) error { return s.ask(ctx, c, notify) })
	if err != nil {
		s.log(c).Warn("an NRI plugin was not notified of what was done to a container", "err", err)
	}
}

// announceStop notifies the plugins once of the end, and returns when they know.
func (s *Store) announceStop(ctx context.Context, c *Container) {
	if !c.announced.Load() || c.stopLock.Acquire(ctx, 1) != nil {
		return
	}
	defer c.stopLock.Release(1)
	if c.stopAnnounced {
		return
	}
	c.stopAnnounced = true
	s.announce(s.begin(ctx, c), c, stepNRIStop, func(p Plugins, ctx context.Context, pod *sandbox.Sandbox, c *Container) error {
		changes, err := p.Stop(ctx, pod, c)
		s.applyChanges(ctx, changes)
		return err
	})
}

// announceRemoval notifies the plugins of the end and the removal, under the container's lock.
func (s *Store) announceRemoval(ctx context.Context, c *Container) {
	if !c.announced.Load() {
		return
	}
	s.announceStop(ctx, c)
	c.announced.Store(false)
	s.announce(s.begin(ctx, c), c, stepNRIRemove, Plugins.Remove)
}

// adjust lets plugins change the spec, and checks the result as the request was checked.
func (c *creation) adjust(ctx context.Context) error {
	before := slices.Clone(c.plan.Spec.Mounts)
	changes, err := c.owner.options.Plugins.Create(ctx, c.sandbox, c.Container, c.plan.Spec, c.injectDevices)
	if err != nil {
		return err
	}
	err = errors.Join(c.checkResources(), c.checkMounts(ctx, before), c.takeCgroup())
	if err == nil {
		err = c.storeSpec(ctx)
	}
	if err != nil {
		return fmt.Errorf("check what NRI plugins have made of the container: %w", err)
	}
	c.owner.applyChanges(ctx, changes)
	return nil
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
	machine, limits := c.owner.options.Machine, c.plan.Spec.Linux.Resources
	if limits.CPU == nil {
		limits.CPU = &specs.LinuxCPU{}
	}
	if limits.Memory == nil {
		limits.Memory = &specs.LinuxMemory{}
	}
	oci.DropUnsupported(limits, machine)
	score := c.plan.Spec.Process.OOMScoreAdj
	if err := validate.InForce("linux.resources.", inForce(limits, *score), machine); err != nil {
		return err
	}
	*score = machine.OOMScoreAdjNear(*score)
	var last []specs.POSIXRlimit // plugins append, and a spec must not have two of a kind
	for _, limit := range c.plan.Spec.Process.Rlimits {
		if limit.Soft > limit.Hard {
			return fmt.Errorf("rlimit %s: the soft limit %d is higher than the hard one, %d: %w", limit.Type, limit.Soft, limit.Hard, errdefs.ErrInvalidArgument)
		}
		last = append(slices.DeleteFunc(last, func(other specs.POSIXRlimit) bool { return other.Type == limit.Type }), limit)
	}
	c.plan.Spec.Process.Rlimits = last
	return nil
}

// checkMounts checks new mounts. It awaits, makes and resolves their sources as it does the kubelet's.
func (c *creation) checkMounts(ctx context.Context, before []specs.Mount) error {
	for i := range c.plan.Spec.Mounts {
		m := &c.plan.Spec.Mounts[i]
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
	source, err := c.owner.source(ctx, m.Source, c.parts.Pod.GetMetadata().GetUid())
	if err != nil {
		return fmt.Errorf("make the source: %w", err)
	}
	m.Source = source
	return nil
}

// takeCgroup checks and records a plugin's cgroup. It must be new: it is emptied with the container.
func (c *creation) takeCgroup() error {
	wanted := c.plan.Spec.Linux.CgroupsPath
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
