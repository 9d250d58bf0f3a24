package container

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/supervisor/client"
)

// Start starts a created container, once. It is Exited if its program cannot be executed (StartError).
func (s *Store) Start(ctx context.Context, id string) error {
	c, err := s.Find(id)
	if err != nil {
		return err
	}
	ctx, cancel := s.outlive(ctx)
	defer cancel()
	err = s.underLock(ctx, c, func() error {
		if state := c.State(); state != runtimeapi.ContainerState_CONTAINER_CREATED {
			return fmt.Errorf("it is %s, only a created one can be started: %w", stateText(state), errdefs.ErrFailedPrecondition)
		}
		steps := s.begin(ctx, c)
		if s.hasPlugins() {
			steps.Step(stepNRIStart, func(ctx context.Context) error { return s.ask(ctx, c, Plugins.Start) })
		}
		// Plugins are notified of the start before the end, however short the life.
		if c.stopLock.Acquire(ctx, 1) != nil {
			return fmt.Errorf("wait for plugins that are notified of its end: %w", context.Cause(ctx))
		}
		defer c.stopLock.Release(1)
		steps.Step(stepStart, func(ctx context.Context) error { return s.start(ctx, c) })
		s.announce(steps, c, stepNRIStarted, Plugins.Started)
		return steps.Err()
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}

func (s *Store) start(ctx context.Context, c *Container) error {
	if reason := c.Facts().StartError; reason != "" {
		return s.noteStartError(ctx, c, fmt.Errorf("%s: %w", reason, errdefs.ErrFailedPrecondition))
	}
	supervisor, err := s.options.Supervisors.Ensure(ctx, c.Supervisor)
	if err != nil {
		return err
	}
	before := time.Now().UnixNano() // the container may have ended when the call returns
	if err := supervisor.Start(ctx, c.ID); err != nil {
		return s.noteStartError(ctx, c, err)
	}
	// The supervisor's event says the same, later or earlier.
	return s.write(c, func(f *Facts) {
		if f.StartedAt == 0 {
			f.StartedAt = before
		}
	})
}

// noteStartError ends a container whose program could not be executed, unless its supervisor is lost.
func (s *Store) noteStartError(ctx context.Context, c *Container, startErr error) error {
	if errdefs.IsUnavailable(startErr) || ctx.Err() != nil {
		return startErr
	}
	s.change(c, func(f *Facts) {
		if f.FinishedAt == 0 {
			f.FinishedAt = time.Now().UnixNano()
		}
		takeStartError(f, errtext.Of(startErr))
	})
	return startErr
}

// write changes the facts, in memory and on disk, unless they were removed, and emits the event. It
// wakes those who wait for the end last: what they do next follows the events.
func (s *Store) write(c *Container, change func(*Facts)) (err error) {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	if c.removed {
		return nil
	}
	before := c.Facts()
	after := c.Update(change)
	ended := before.FinishedAt == 0 && after.FinishedAt != 0
	switch {
	case after.FinishedAt != 0:
		c.held.Release()
	case c.held == nil && after.supervised():
		c.held = client.Hold(s.options.Supervisors.Dir(c.Supervisor), c.ID, after.Process)
	}
	if ended {
		c.noteExit(after)
		s.log(c).Info("container ended", "code", after.ExitCode, "reason", after.ExitReason(), "oom", after.OOMKilled)
		if s.options.ObserveExit != nil {
			s.options.ObserveExit(after.ExitReason())
		}
	}
	onDisk, unchanged := *after, *before
	unchanged.Unknown = after.Unknown // which is not written: a restart leaves the file as it is
	if c.unwritten || !reflect.DeepEqual(onDisk, unchanged) {
		onDisk.Timeline = c.Timeline()
		err = s.files.Facts.Write(c.ID, onDisk)
		c.unwritten = err != nil // the next change writes it, whatever it changes
	}
	// A failed start only ends. Both may happen while no daemon runs.
	if before.StartedAt == 0 && after.StartedAt != 0 && after.Reason != reasonStartError {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	}
	if ended {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
		close(c.ended)
		s.Go(func() {
			ctx, cancel := s.within(s.options.Sandboxes.Limits().Create)
			defer cancel()
			s.announceStop(ctx, c)
		})
	}
	return err
}

// change is write from outside an operation; it waits for none.
func (s *Store) change(c *Container, change func(*Facts)) {
	if err := s.write(c, change); err != nil {
		s.log(c).Error("the facts of a container are not on disk", "err", err)
	}
}

// show lists a container that is made, which may have ended meanwhile: then its end is told now.
func (s *Store) show(c *Container) {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	c.Show()
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	if c.Facts().FinishedAt != 0 {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
}

func (s *Store) emit(c *Container, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && c.Listed() {
		s.options.Events.ContainerEvent(c, kind)
	}
}

// Stop sends the stop signal, waits for the grace, and kills all of the container. An ended or unknown
// container is stopped. Calls may run in parallel; the shortest grace counts.
func (s *Store) Stop(ctx context.Context, id string, grace time.Duration) error {
	c, err := s.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := s.repeatable(ctx)
	defer cancel()
	if err := s.stop(ctx, c, grace); err != nil {
		return fmt.Errorf("stop container %s: %w", c.ID, err)
	}
	return nil
}

func (s *Store) stop(ctx context.Context, c *Container, grace time.Duration) error {
	state := c.State()
	ended := state == runtimeapi.ContainerState_CONTAINER_EXITED
	if !ended && grace > 0 && state != runtimeapi.ContainerState_CONTAINER_CREATED { // in a created one nothing could listen
		if err := s.send(ctx, c, c.StopSignal, false); err != nil && !errdefs.IsNotFound(err) && !isBeingMade(err) {
			return err
		}
		select {
		case <-c.ended:
			ended = true
		case <-time.After(grace):
		case <-ctx.Done():
			return fmt.Errorf("it had %v to end: %w", grace, context.Cause(ctx))
		}
	}
	if !ended {
		if err := s.begin(ctx, c).Do(stepKill, func(ctx context.Context) error { return s.kill(ctx, c) }); err != nil {
			return err
		}
	}
	select { // the event of the end comes before those of what the caller does next
	case <-c.ended:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	s.announceStop(ctx, c)
	return nil
}

func (s *Store) send(ctx context.Context, c *Container, signal uint32, all bool) error {
	_, err := s.options.Supervisors.Call(ctx, c.Supervisor, func(supervisor *client.Client) error { return supervisor.Kill(ctx, c.ID, signal, all) })
	return err
}

// isBeingMade reports whether a supervisor refused a signal for a container that is still being created.
func isBeingMade(err error) bool {
	return errdefs.IsFailedPrecondition(err) && !errors.Is(err, client.ErrUnknownBuild)
}

// kill kills every process of the container and waits until its supervisor reports the end.
func (s *Store) kill(ctx context.Context, c *Container) error {
	limit := s.options.Sandboxes.Limits().Kill
	for over := (<-chan time.Time)(nil); ; {
		err := s.send(ctx, c, uint32(unix.SIGKILL), true)
		if errdefs.IsNotFound(err) {
			return s.killUnlisted(c)
		}
		if err != nil && !isBeingMade(err) {
			return err
		}
		if over == nil { // it is killed now; a supervisor that hangs may have been replaced before
			over = time.After(limit)
		}
		select {
		case <-c.ended:
			return nil
		case <-time.After(limit / 20): // one whose creation is being given up has no end, but is forgotten then
		case <-over:
			return fmt.Errorf("it still runs %v after SIGKILL, perhaps in uninterruptible sleep (state D): retry: %w", limit, errdefs.ErrUnavailable)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// stopSignal returns the signal that the container asks for, or that its image does, or SIGTERM.
func stopSignal(asked runtimeapi.Signal, image string) uint32 {
	for _, text := range []string{strings.TrimPrefix(asked.String(), "SIGNAL_"), image} {
		if number, known := signalNumber(text); known {
			return number
		}
	}
	return uint32(unix.SIGTERM)
}

// signalNumber parses a signal's number or name, with or without SIG; the CRI has RTMINPLUS1 for RTMIN+1.
func signalNumber(text string) (uint32, bool) {
	parsed, err := signal.ParseSignal(signs.Replace(text))
	return uint32(parsed), err == nil && parsed > 0 && parsed <= 64 // SIGRTMAX (signal(7))
}

var signs = strings.NewReplacer("PLUS", "+", "MINUS", "-")

// signalEnum returns the CRI's first name of a signal, which is the kernel's, or SIGNAL_RUNTIME_DEFAULT.
func signalEnum(number uint32) (first runtimeapi.Signal) {
	for value, name := range runtimeapi.Signal_name {
		same, known := signalNumber(strings.TrimPrefix(name, "SIGNAL_"))
		if shown := runtimeapi.Signal(value); known && same == number && (first == 0 || shown < first) {
			first = shown
		}
	}
	return first
}
