package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/tree"
)

// Remove kills a running container and removes all of it, the name last. An unknown id is no error.
func (s *Store) Remove(ctx context.Context, id string) error {
	c, err := s.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := s.outlive(ctx)
	defer cancel()
	if err := s.remove(ctx, c); err != nil {
		return fmt.Errorf("remove container %s: %w", c.ID, err)
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

// destroy is the only undo. It tries every part, and removes the record only when nothing else is left.
// The caller holds the container's lock.
func (s *Store) destroy(ctx context.Context, c *Container) error {
	s.announceRemoval(ctx, c)
	steps := s.begin(ctx, c)
	err := errors.Join(
		steps.Do(stepDelete, func(ctx context.Context) error {
			if err := s.options.Supervisors.Delete(ctx, c.Supervisor, c.ID); err != nil {
				return err
			}
			// The cgroup is left if no supervisor serves, or knows the container.
			return s.options.Hierarchies.Remove(cgroup.Path(c.CgroupsPath), s.options.Sandboxes.Limits().Kill)
		}),
		steps.Do(stepRemoveRootfs, func(ctx context.Context) error { return s.removeRootfs(ctx, c.ID, len(c.ImageMounts)) }),
	)
	if err == nil {
		err = steps.Do(stepRemoveRecord, func(context.Context) error {
			return errors.Join(s.removeFacts(c), s.files.Records.Remove(c.ID))
		})
	}
	if err != nil {
		return err
	}
	s.Forget(c)
	// A supervisor that started meanwhile has adopted what its predecessor left.
	if err := s.options.Supervisors.Delete(ctx, c.Supervisor, c.ID); err != nil {
		s.log(c).Warn("the supervisor may still hold a removed container", "err", err)
	}
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT)
	s.keepLife(c.ID, c.SandboxID, c.config.GetMetadata(), c.Failure, c.Timeline())
	return nil
}

// removeFacts also prevents the writing of what a supervisor reports later.
func (s *Store) removeFacts(c *Container) error {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	c.removed = true
	c.held.Close()
	c.held = nil
	return s.files.Facts.Remove(c.ID)
}

// removeRootfs removes the files of a container with so many mounted images, their mounts and snapshots.
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
	containers := s.OfPod(sandboxID)
	errs := make([]error, len(containers))
	var wait sync.WaitGroup
	for i, c := range containers {
		wait.Go(func() { errs[i] = do(c) })
	}
	wait.Wait()
	return errors.Join(errs...)
}
