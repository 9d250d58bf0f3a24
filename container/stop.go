package container

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
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

// The real-time signals that a program may use (signal(7), glibc's view).
const (
	firstRealTime = 34
	lastRealTime  = 64
	// mostAfterMin is up to which one the CRI counts from the first.
	mostAfterMin = 15
)

// signalNumber reads a signal's name, with or without SIG, or its number.
func signalNumber(text string) (uint32, bool) {
	if number, err := strconv.ParseUint(text, 10, 32); err == nil {
		return uint32(number), number > 0 && number <= lastRealTime
	}
	name := strings.TrimPrefix(strings.ToUpper(text), "SIG")
	switch name { // second names of a signal, which unix.SignalNum does not know
	case "CLD":
		name = "CHLD"
	case "POLL":
		name = "IO"
	case "IOT":
		name = "ABRT"
	}
	if signal := unix.SignalNum("SIG" + name); signal != 0 {
		return uint32(signal), true
	}
	return realTime(name)
}

// realTime reads RTMIN, RTMIN+n, RTMAX and RTMAX-n; the CRI writes RTMINPLUS1.
func realTime(name string) (uint32, bool) {
	name = strings.NewReplacer("PLUS", "+", "MINUS", "-").Replace(name)
	for prefix, base := range map[string]int{"RTMIN": firstRealTime, "RTMAX": lastRealTime} {
		rest, found := strings.CutPrefix(name, prefix)
		if !found {
			continue
		}
		offset := 0
		if rest != "" {
			var err error
			if offset, err = strconv.Atoi(rest); err != nil {
				return 0, false
			}
		}
		signal := base + offset
		return uint32(signal), signal >= firstRealTime && signal <= lastRealTime
	}
	return 0, false
}

// signalEnum is the CRI's name of a signal: of those that have two, the kernel's.
func signalEnum(number uint32) runtimeapi.Signal {
	name := unix.SignalName(unix.Signal(number))
	switch fromMin, toMax := int(number)-firstRealTime, lastRealTime-int(number); {
	case fromMin == 0:
		name = "SIGRTMIN"
	case toMax == 0:
		name = "SIGRTMAX"
	case fromMin > 0 && fromMin <= mostAfterMin:
		name = "SIGRTMINPLUS" + strconv.Itoa(fromMin)
	case fromMin > 0 && toMax > 0:
		name = "SIGRTMAXMINUS" + strconv.Itoa(toMax)
	}
	return runtimeapi.Signal(runtimeapi.Signal_value["SIGNAL_"+name]) // 0, the runtime's default, for none
}
