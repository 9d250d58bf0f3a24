package container

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/supervisor/client"
)

// Stop sends the container's stop signal, waits for the grace, and kills all of
// it. A container that has ended, or is unknown, is stopped. Several calls may
// wait side by side, and the shortest grace counts.
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

// stop ends the container and notifies the plugins.
func (s *Store) stop(ctx context.Context, c *Container, grace time.Duration) error {
	if err := s.end(ctx, c, grace); err != nil {
		return err
	}
	s.announceStop(ctx, c)
	return nil
}

func (s *Store) end(ctx context.Context, c *Container, grace time.Duration) error {
	switch c.State() {
	case runtimeapi.ContainerState_CONTAINER_EXITED:
		return s.awaitEmitted(ctx, c)
	case runtimeapi.ContainerState_CONTAINER_CREATED:
		grace = 0 // nothing runs in it that could listen
	}
	if grace > 0 {
		done, err := s.stopGently(ctx, c, grace)
		if done || err != nil {
			return err
		}
	}
	return s.begin(ctx, c).Do(stepKill, func(ctx context.Context) error { return s.kill(ctx, c) })
}

// awaitEmitted waits until the event of the end of a container is emitted: it
// comes before those of what the caller does next.
func (s *Store) awaitEmitted(ctx context.Context, c *Container) error {
	select {
	case <-c.ended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stopGently asks the container to end, and reports whether it did.
func (s *Store) stopGently(ctx context.Context, c *Container, grace time.Duration) (done bool, err error) {
	if err := s.send(ctx, c, c.StopSignal, false); err != nil && !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) {
		return false, err
	}
	select {
	case <-c.ended:
		return true, nil
	case <-time.After(grace):
		return false, nil
	case <-ctx.Done():
		return false, fmt.Errorf("it had %v to end: %w", grace, context.Cause(ctx))
	}
}

// sendTries is how many supervisors may die over one signal.
const sendTries = 3

// send has the supervisor signal the container. One that dies during the call, also
// because it hung, is replaced, and the successor is asked.
func (s *Store) send(ctx context.Context, c *Container, signal uint32, all bool) (err error) {
	for range sendTries {
		shim, startErr := s.shimOf(ctx, c.group())
		if startErr != nil {
			return startErr
		}
		if err = shim.Kill(ctx, c.ID, signal, all); !errors.Is(err, client.ErrLost) {
			return err
		}
		select {
		case <-time.After(reconnectInterval):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}

// kill ends every process of the container and waits until its supervisor
// has reported the end.
func (s *Store) kill(ctx context.Context, c *Container) error {
	err := s.send(ctx, c, uint32(unix.SIGKILL), true)
	if errdefs.IsNotFound(err) {
		return s.killUnlisted(c)
	}
	if err != nil && !errdefs.IsFailedPrecondition(err) {
		return err
	}
	select {
	case <-c.ended:
		return nil
	case <-time.After(s.limits.Load().Kill):
		return fmt.Errorf("it still runs %v after SIGKILL, perhaps in uninterruptible sleep (state D): retry: %w", s.limits.Load().Kill, errdefs.ErrUnavailable)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stopSignal is the signal that Stop sends: what the container asks for, or
// else what its image does, or else SIGTERM.
func stopSignal(asked runtimeapi.Signal, image string) uint32 {
	if asked != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
		if signal, known := signalNumber(strings.TrimPrefix(asked.String(), "SIGNAL_")); known {
			return signal
		}
	}
	if signal, known := signalNumber(image); known {
		return signal
	}
	return uint32(unix.SIGTERM)
}

// signalNumber reads a signal's name, with or without SIG, or its number; the CRI writes
// RTMINPLUS1 for RTMIN+1.
func signalNumber(text string) (uint32, bool) {
	parsed, err := signal.ParseSignal(signs.Replace(text))
	return uint32(parsed), err == nil && parsed > 0 && parsed <= unix.Signal(lastSignal)
}

var signs = strings.NewReplacer("PLUS", "+", "MINUS", "-")

// lastSignal is SIGRTMAX (signal(7)).
const lastSignal = 64

// signalEnum is the CRI's name of a signal: of those that have two, the first, which is
// the kernel's; SIGNAL_RUNTIME_DEFAULT for none.
func signalEnum(number uint32) (first runtimeapi.Signal) {
	for value, name := range runtimeapi.Signal_name {
		same, known := signalNumber(strings.TrimPrefix(name, "SIGNAL_"))
		if shown := runtimeapi.Signal(value); known && same == number && (first == 0 || shown < first) {
			first = shown
		}
	}
	return first
}
