package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/stdio"
)

// delete removes a stopped container. It may be called again after an error.
func (c *container) delete(ctx context.Context) error {
	if err := c.lockWithin(killTimeout); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	defer c.op.Unlock()
	if !c.hasEnded() {
		return fmt.Errorf("delete container %s: it has not ended: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), operationLimit)
	defer cancel()
	if err := c.runtime.Delete(ctx); err != nil {
		return fmt.Errorf("delete container %s: %w: %w", c.record.ID, errdefs.ErrUnavailable, err)
	}
	if err := c.removeFiles(); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	_ = c.init.Close()
	c.sup.forget(c.record.ID)
	c.publish(api.EventKind_EVENT_DELETED)
	return nil
}

func (c *container) removeFiles() error {
	var errs []error
	if !c.record.Bare {
		errs = append(errs, stdio.RemoveFifos(c.streamOptions().Dir, c.record.ID), os.RemoveAll(c.sup.exitPath(c.record.ID)))
	}
	return errors.Join(append(errs, c.sup.removeRecord(c.record.ID))...)
}

// lockWithin takes op, which a hook that hangs may hold.
func (c *container) lockWithin(limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for pause := 50 * time.Microsecond; !c.op.TryLock(); pause = min(2*pause, time.Millisecond) {
		time.Sleep(pause)
		if time.Now().After(deadline) {
			return fmt.Errorf("another operation on it is not done within %v: %w", limit, errdefs.ErrUnavailable)
		}
	}
	return nil
}

// removeUnreadable removes the files of a container which is left alone because its
// record cannot be used, and which the daemon deletes.
func (s *Supervisor) removeUnreadable(id string) error {
	var errs []error
	for _, pattern := range []string{stateDir, filepath.Join(programsDir, "*")} {
		found, _ := filepath.Glob(filepath.Join(s.dir, pattern, id)) // a good pattern
		for _, path := range found {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	return errors.Join(append(errs, stdio.RemoveFifos(filepath.Join(s.dir, api.StreamDir), id), os.RemoveAll(s.exitPath(id)), s.removeRecord(id))...)
}
