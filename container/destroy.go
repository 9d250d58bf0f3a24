package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/tree"
	"github.com/minicri/minicri/supervisor/client"
)

// Remove kills the container if it runs and removes all of it, the name last.
// Calling it again, or for an unknown id, is no error.
func (s *Store) Remove(ctx context.Context, id string) error {
	c, err := s.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := s.outlive(ctx, s.limits.Load().Create)
	defer cancel()
	if err := s.remove(ctx, c); err != nil {
		return fmt.Errorf("remove container %s: %w", c.ID, err)
	}
	return nil
}

// remove is Remove, also of a container that was partially created and is still to be
// rolled back.
func (s *Store) remove(ctx context.Context, c *Container) error {
	if c.listed.Load() {
		if err := s.stop(ctx, c, 0); err != nil {
			return err
		}
	}
	unlock, err := c.acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if !s.exists(c.ID) { // another Remove was faster
		return nil
	}
	return s.destroy(ctx, c)
}

func (s *Store) exists(id string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.byID[id] != nil
}

// destroy is the only undo. It removes every part that a container may have, and
// continues where one fails; the record is removed last and only when nothing
// else is left. The container's lock is held.
func (s *Store) destroy(ctx context.Context, c *Container) error {
	s.announceRemoval(ctx, c)
	steps := s.begin(ctx, c)
	err := errors.Join(
		steps.Do(stepDelete, func(ctx context.Context) error { return s.deleteProcesses(ctx, c) }),
		steps.Do(stepRemoveRootfs, func(ctx context.Context) error { return s.removeRootfs(ctx, c.ID, c.numbers()) }),
	)
	if err == nil {
		err = steps.Do(stepRemoveRecord, func(context.Context) error {
			return errors.Join(s.removeFacts(c), s.records.Remove(c.ID))
		})
	}
	if err == nil {
		s.forget(c)
		s.notifySupervisor(ctx, c)
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT)
		s.keepLife(c)
	}
	return err
}

// deleteProcesses has the supervisor delete the container. Without a supervisor, or
// where it does not know the container, only the cgroup may be left.
func (s *Store) deleteProcesses(ctx context.Context, c *Container) error {
	shim, err := s.options.Supervisors.Connect(ctx, c.group())
	if err == nil {
		err = s.killAndDelete(ctx, c, shim)
	}
	c.unserved = errdefs.IsUnavailable(err)
	if err != nil && !c.unserved && !errdefs.IsNotFound(err) {
		return err
	}
	return s.options.Hierarchies.Remove(cgroup.Path(c.CgroupsPath), s.limits.Load().Kill)
}

// notifySupervisor is for a supervisor that began to serve while the container was
// being destroyed, and has adopted it from what its predecessor left on disk. One
// that begins from now on finds that the container is gone (reconcile).
func (s *Store) notifySupervisor(ctx context.Context, c *Container) {
	if !c.unserved {
		return
	}
	shim, err := s.options.Supervisors.Connect(ctx, c.group())
	if err == nil {
		err = s.killAndDelete(ctx, c, shim)
	}
	if err != nil && !errdefs.IsUnavailable(err) && !errdefs.IsNotFound(err) {
		s.log(c).Warn("the supervisor may still hold a removed container", "err", err)
	}
}

// deleteRetry is between two attempts to delete what was killed.
const deleteRetry = 2 * time.Millisecond

// killAndDelete: one that was made and never started still has its init, at
// the exec barrier, and takes a moment to go. The supervisor stays, for the pod's
// next container.
func (s *Store) killAndDelete(ctx context.Context, c *Container, shim *client.Client) error {
	for deadline := time.Now().Add(s.limits.Load().Kill); ; time.Sleep(deleteRetry) {
		err := shim.Delete(ctx, c.ID, true)
		if !errdefs.IsFailedPrecondition(err) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("it still runs %v after SIGKILL: %w: %w", s.limits.Load().Kill, errdefs.ErrUnavailable, err)
		}
		err = shim.Kill(ctx, c.ID, uint32(unix.SIGKILL), true)
		if err != nil && !errdefs.IsNotFound(err) { // not found: it has ended
			return err
		}
	}
}

// removeRootfs removes a container's files, and what is mounted among them.
func (s *Store) removeRootfs(ctx context.Context, id string, mounted []string) error {
	if err := s.removeImages(ctx, id, mounted); err != nil {
		return err
	}
	if err := s.options.Images.Unmount(s.rootfs(id)); err != nil {
		return err
	}
	err := errors.Join(tree.Remove(s.volumes(id)), os.RemoveAll(s.dir(id)))
	return errors.Join(s.options.Images.RemoveSnapshot(ctx, id), err)
}

// StopPod stops all containers of a sandbox, side by side, at once, and lets no
// other one be made.
func (s *Store) StopPod(ctx context.Context, sandboxID string) error {
	s.mu.Lock()
	s.stopping[sandboxID] = true
	s.mu.Unlock()
	return s.each(sandboxID, func(c *Container) error {
		if c.abandon != nil {
			c.abandon(fmt.Errorf("sandbox %s is being stopped: %w", sandboxID, errdefs.ErrFailedPrecondition))
		}
		if err := s.awaitMade(ctx, c); err != nil || !c.listed.Load() {
			return err
		}
		if err := s.stop(ctx, c, 0); err != nil {
			return err
		}
		s.leaveSupervisor(ctx, c)
		return nil
	})
}

// leaveSupervisor has the supervisor forget a container that has ended, whose
// facts are ours: pods that have ended cost nothing. What fails is tried again
// when the container is removed.
func (s *Store) leaveSupervisor(ctx context.Context, c *Container) {
	if supervisor, err := s.options.Supervisors.Connect(ctx, c.group()); err == nil && c.Facts().inShim() {
		if err := supervisor.Delete(ctx, c.ID, false); err != nil && !errdefs.IsNotFound(err) {
			s.log(c).Warn("the supervisor keeps a container that has ended", "err", err)
		}
	}
}

// awaitMade waits while the container is being made, or rolled back.
func (s *Store) awaitMade(ctx context.Context, c *Container) error {
	if c.listed.Load() {
		return nil
	}
	unlock, err := c.acquire(ctx)
	if err != nil {
		return err
	}
	unlock()
	return nil
}

// RemovePod removes all containers of a sandbox.
func (s *Store) RemovePod(ctx context.Context, sandboxID string) error {
	if err := s.each(sandboxID, func(c *Container) error { return s.remove(ctx, c) }); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.stopping, sandboxID)
	return nil
}

func (s *Store) each(sandboxID string, do func(*Container) error) error {
	containers := s.OfPod(sandboxID)
	errs := make([]error, len(containers))
	var wait sync.WaitGroup
	for i, c := range containers {
		wait.Go(func() { errs[i] = do(c) })
	}
	wait.Wait()
	return errors.Join(errs...)
}
