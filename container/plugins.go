package container

import (
	"context"
	"log/slog"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/sandbox"
)

// Plugins take part in the lives of containers (package nri). Each call ends, by its own limits or with
// its context. Errors of Create, Start and Update refuse the operation; others are only logged.
type Plugins interface {
	// Enabled reports whether there may be plugins. If not, nothing else is called; later ones get all that
	// exist.
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
