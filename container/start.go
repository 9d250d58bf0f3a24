package container

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/errtext"
)

// Start lets a created container run, once. A program that cannot be executed
// leaves the container Exited with the reason StartError.
func (s *Store) Start(ctx context.Context, id string) error {
	c, err := s.Find(id)
	if err != nil {
		return err
	}
	ctx, cancel := s.outlive(ctx, s.limits.Load().Create)
	defer cancel()
	unlock, err := c.acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if state := c.State(); state != runtimeapi.ContainerState_CONTAINER_CREATED {
		return fmt.Errorf("container %s is %s, only a created one can be started: %w", c.ID, stateText(state), errdefs.ErrFailedPrecondition)
	}
	if !s.exists(c.ID) { // removed meanwhile
		return fmt.Errorf("container %s: %w", c.ID, errdefs.ErrNotFound)
	}
	steps := s.begin(ctx, c)
	if s.hasPlugins() {
		steps.Step(stepNRIStart, func(ctx context.Context) error { return s.askStart(ctx, c) })
	}
	// Plugins are notified of the start before the end, however short the life.
	if err := c.stopLock.Lock(ctx); err != nil {
		return fmt.Errorf("container %s: wait for plugins that are notified of its end: %w", c.ID, err)
	}
	defer c.stopLock.Unlock()
	steps.Step(stepStart, func(ctx context.Context) error { return s.start(ctx, c) })
	if err := steps.Err(); err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	s.announce(steps, c, stepNRIStarted, Plugins.Started)
	return nil
}

func (s *Store) start(ctx context.Context, c *Container) error {
	if reason := c.Facts().StartError; reason != "" {
		return s.noteStartError(ctx, c, fmt.Errorf("%s: %w", reason, errdefs.ErrFailedPrecondition))
	}
	shim, err := s.shimOf(ctx, c.group())
	if err != nil {
		return err
	}
	before := time.Now().UnixNano() // the container may have ended when the call returns
	if err := shim.Start(ctx, c.ID); err != nil {
		return s.noteStartError(ctx, c, err)
	}
	// The supervisor's event says the same, later or earlier.
	return s.write(c, func(f *Facts) {
		if f.StartedAt == 0 {
			f.StartedAt = before
		}
	})
}

// startErrorCode is what containerd gives to a program that cannot be executed.
const startErrorCode = 128

// noteStartError ends a container whose program could not be executed. If the
// supervisor was lost this is not known; reconcile finds out. The event of the end
// may have come before.
func (s *Store) noteStartError(ctx context.Context, c *Container, startErr error) error {
	if errdefs.IsUnavailable(startErr) || ctx.Err() != nil {
		return startErr
	}
	err := s.write(c, func(f *Facts) {
		if f.FinishedAt == 0 {
			f.FinishedAt = time.Now().UnixNano()
		}
		takeStartError(f, errtext.Of(startErr))
	})
	if err != nil {
		s.log(c).Error("a failed start is not on disk", "err", err)
	}
	return startErr
}

// write changes the facts, in memory and on disk, unless they were removed, and
// emits the event of the change.
func (s *Store) write(c *Container, change func(*Facts)) error {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	if c.removed {
		return nil
	}
	before := c.Facts()
	after := c.update(change)
	c.holdOutput(s.options.Supervisors.Dir(c.group()))
	if before.FinishedAt == 0 && after.FinishedAt != 0 {
		c.noteExit(after)
		s.logExit(c, after)
		if s.options.ObserveExit != nil {
			s.options.ObserveExit(after.ExitReason())
		}
	}
	var err error
	if c.unwritten || !after.sameFile(before) {
		onDisk := *after
		onDisk.Timeline = c.Timeline()
		err = s.facts.Write(c.ID, onDisk)
		c.unwritten = err != nil
	}
	s.emitChange(c, before, after)
	c.wakeWaiters()
	if before.FinishedAt == 0 && after.FinishedAt != 0 {
		s.work.Go(func() {
			ctx, cancel := s.within(s.limits.Load().Create)
			defer cancel()
			s.announceStop(ctx, c)
		})
	}
	return err
}

// removeFacts removes them for good: what a supervisor reports later is not written.
func (s *Store) removeFacts(c *Container) error {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	c.removed = true
	c.holdOutput("")
	return s.facts.Remove(c.ID)
}
