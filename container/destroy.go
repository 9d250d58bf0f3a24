package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/tree"
	"github.com/minicri/minicri/supervisor/client"
)

// Stop sends the stop signal, waits for the grace, and kills all of the container. An ended or unknown
// container is stopped. Calls may run in parallel; the shortest grace counts.
func (s *Store) Stop(ctx context.Context, id string, grace time.Duration) error {
	ctx, cancel := s.repeatable(ctx)
	defer cancel()
	return s.end(id, "stop", func(c *Container) error { return s.stop(ctx, c, grace) })
}

func (s *Store) stop(ctx context.Context, c *Container, grace time.Duration) error {
	state := c.State()
	ended := state == runtimeapi.ContainerState_CONTAINER_EXITED
	if !ended && grace > 0 && state != runtimeapi.ContainerState_CONTAINER_CREATED { // nothing in a created one could take the signal
		err := s.send(ctx, c, c.StopSignal, false)
		if errdefs.IsPermissionDenied(err) { // its AppArmor profile refuses signals: a grace would be in vain
			err, grace = nil, 0
		}
		if err != nil && !errdefs.IsNotFound(err) && !isBeingMade(err) {
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
	select { // so that the event of the end precedes those of what the caller does next
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
		case <-time.After(limit / 20): // a container whose creation is given up has no end: its supervisor forgets it
		case <-over:
			return fmt.Errorf("it still runs %v after SIGKILL, perhaps in uninterruptible sleep (state D): retry: %w", limit, errdefs.ErrUnavailable)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Remove kills a running container and removes all of it, the name last. An unknown id is no error.
func (s *Store) Remove(ctx context.Context, id string) error {
	ctx, cancel := s.outlive(ctx)
	defer cancel()
	return s.end(id, "remove", func(c *Container) error { return s.remove(ctx, c) })
}

// end calls do with the container, if there is one.
func (s *Store) end(id, name string, do func(*Container) error) error {
	c, err := s.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := do(c); err != nil {
		return fmt.Errorf("%s container %s: %w", name, c.ID, err)
	}
	return nil
}

// remove is Remove, also of a partially created container that awaits its rollback.
func (s *Store) remove(ctx context.Context, c *Container) error {
	if c.Listed() {
		if err := s.stop(ctx, c, 0); err != nil {
			return err
		}
	}
	err := s.underLock(ctx, c, func() error { return s.destroy(ctx, c) })
	if errdefs.IsNotFound(err) { // another Remove was faster
		return nil
	}
	return err
}

// destroy is the only undo. Files go when no process uses them, and poststop hooks have had them; the record goes when
// nothing else is left. The caller holds the container's lock.
func (s *Store) destroy(ctx context.Context, c *Container) error {
	s.announceRemoval(ctx, c)
	steps := s.begin(ctx, c)
	err := steps.Do(stepDelete, func(ctx context.Context) error {
		if err := s.options.Supervisors.Delete(ctx, c.Supervisor, c.ID); err != nil {
			return err
		}
		// The cgroup is left if no supervisor serves, or knows the container.
		return s.options.Hierarchies.Remove(cgroup.Path(c.CgroupsPath), s.options.Sandboxes.Limits().Kill)
	})
	if err == nil {
		err = steps.Do(stepRemoveRootfs, func(ctx context.Context) error { return s.removeRootfs(ctx, c.ID, len(c.ImageMounts)) })
	}
	if err == nil {
		err = steps.Do(stepRemoveRecord, func(context.Context) error {
			return errors.Join(s.removeFacts(c), s.files.Records.Remove(c.ID))
		})
	}
	if err != nil {
		return err
	}
	s.Forget(c)
	// A supervisor that started meanwhile may have adopted the container.
	if err := s.options.Supervisors.Delete(ctx, c.Supervisor, c.ID); err != nil {
		s.log(c).Warn("the supervisor may still hold a removed container", "err", err)
	}
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT)
	s.keepLife(c.ID, c.SandboxID, c.config.GetMetadata(), c.Failure, c.Timeline())
	return nil
}

// removeFacts removes the facts. What a supervisor reports later is not written.
func (s *Store) removeFacts(c *Container) error {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	c.removed = true
	c.held.Close()
	c.held = nil
	return s.files.Facts.Remove(c.ID)
}

// removeRootfs removes the mounts, snapshots and files of a container that mounts so many images.
func (s *Store) removeRootfs(ctx context.Context, id string, images int) error {
	mounted, err := os.ReadDir(filepath.Join(s.dir(id), "images"))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	for _, entry := range mounted {
		err = errors.Join(err, s.options.Images.Unmount(filepath.Join(s.dir(id), "images", entry.Name())))
	}
	for i := range images {
		err = errors.Join(err, s.options.Images.RemoveSnapshot(ctx, imageKey(id, i)))
	}
	if err = errors.Join(err, s.options.Images.Unmount(s.rootfs(id))); err != nil {
		return err
	}
	return errors.Join(tree.Remove(s.volumes(id)), os.RemoveAll(s.dir(id)), s.options.Images.RemoveSnapshot(ctx, id))
}

// StopPod stops all containers of a sandbox at once, in parallel, and prevents new ones.
func (s *Store) StopPod(ctx context.Context, sandboxID string) error {
	s.stopping.Store(sandboxID, nil)
	return s.each(sandboxID, func(c *Container) error {
		if c.abandon != nil {
			c.abandon(fmt.Errorf("sandbox %s is being stopped: %w", sandboxID, errdefs.ErrFailedPrecondition))
		}
		if !c.Listed() { // it is being made, or rolled back
			unlock, err := c.Acquire(ctx)
			if err != nil {
				return err
			}
			if unlock(); !c.Listed() {
				return nil
			}
		}
		if err := s.stop(ctx, c, 0); err != nil {
			return err
		}
		s.leaveSupervisor(ctx, c)
		return nil
	})
}

// leaveSupervisor has the supervisor forget an ended container; the removal retries it.
func (s *Store) leaveSupervisor(ctx context.Context, c *Container) {
	if supervisor, err := s.options.Supervisors.Connect(ctx, c.Supervisor); err == nil && c.Facts().supervised() {
		if err := supervisor.Delete(ctx, c.ID, false); err != nil && !errdefs.IsNotFound(err) {
			s.log(c).Warn("the supervisor keeps a container that has ended", "err", err)
		}
	}
}

// RemovePod removes all containers of a sandbox.
func (s *Store) RemovePod(ctx context.Context, sandboxID string) error {
	if err := s.each(sandboxID, func(c *Container) error { return s.remove(ctx, c) }); err != nil {
		return err
	}
	s.stopping.Delete(sandboxID)
	return nil
}

func (s *Store) each(sandboxID string, do func(*Container) error) error {
	containers := s.ofPod(sandboxID)
	errs := make([]error, len(containers))
	var wait sync.WaitGroup
	for i, c := range containers {
		wait.Go(func() { errs[i] = do(c) })
	}
	wait.Wait()
	return errors.Join(errs...)
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
