package container

import (
	"context"
	"log/slog"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/sandbox"
)

// Plugins take part in the lives of containers, as NRI plugins do (package nri).
// Each call ends, by limits of its own or with its context. An error of Create,
// Start or Update refuses the operation; those of the others are only logged.
type Plugins interface {
	// Enabled reports whether there may be plugins now. While it does not, no other
	// method is called; plugins that come later are sent the containers that there are.
	Enabled() bool
	// Create adjusts the spec of a container that is being made; inject adds CDI
	// devices to it. It returns what is to change for other containers.
	Create(ctx context.Context, pod *sandbox.Sandbox, c *Container, spec *specs.Spec, inject Inject) ([]Change, error)
	Created(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	Start(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	Started(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	// Update returns the resources that the container is to get instead of those
	// that were asked for, and what is to change for others.
	Update(ctx context.Context, pod *sandbox.Sandbox, c *Container, asked *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, []Change, error)
	Updated(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
	// Stop is called once after the container's end, however that came, Remove
	// before it is removed.
	Stop(ctx context.Context, pod *sandbox.Sandbox, c *Container) ([]Change, error)
	Remove(ctx context.Context, pod *sandbox.Sandbox, c *Container) error
}

// Inject adds CDI devices to a spec.
type Inject func(spec *specs.Spec, devices []string) error

// Change is what a plugin wants to change of a container's resources.
type Change struct {
	ID string
	// Plugins are those that wanted changes when it came up.
	Plugins   []string
	Resources *runtimeapi.LinuxContainerResources
	// Optional: the plugin expects that it may not be possible.
	Optional bool
}

// hasPlugins reports whether there may be plugins now.
func (s *Store) hasPlugins() bool { return s.options.Plugins != nil && s.options.Plugins.Enabled() }

// applyChanges makes the changes that plugins want for containers other than the one that
// they were asked about. One that fails is logged. The caller holds no lock of a container
// that others can see.
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

// ask asks the plugins something about a container.
func (s *Store) ask(ctx context.Context, c *Container, question func(Plugins, context.Context, *sandbox.Sandbox, *Container) error) error {
	pod, err := s.options.Sandboxes.Find(c.SandboxID)
	if err != nil {
		return err
	}
	return question(s.options.Plugins, ctx, pod, c)
}

// askUpdate returns what the plugins make of resources that are asked for.
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

// announce notifies the plugins of what was done to a container; an error is
// logged and changes nothing.
func (s *Store) announce(steps *step.Sequence, c *Container, name step.Name, notify func(Plugins, context.Context, *sandbox.Sandbox, *Container) error) {
	if !s.hasPlugins() || steps.Err() != nil {
		return
	}
	err := steps.Do(name, func(ctx context.Context) error { return s.ask(ctx, c, notify) })
	if err != nil {
		s.log(c).Warn("an NRI plugin was not notified of what was done to a container", "err", err)
	}
}

// announceStop notifies the plugins once that the container has ended, and
// returns when they are notified, by this call or another.
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

// announceRemoval notifies the plugins that the container is removed, and before
// that that it has ended. The container's lock is held.
func (s *Store) announceRemoval(ctx context.Context, c *Container) {
	if !c.announced.Load() {
		return
	}
	s.announceStop(ctx, c)
	c.announced.Store(false)
	s.announce(s.begin(ctx, c), c, stepNRIRemove, Plugins.Remove)
}
