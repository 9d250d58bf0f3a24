package supervisor

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/stdio"
)

// delete removes a stopped container. It may be called again after an error.
func (c *container) delete() error {
	if err := c.lockWithin(killTimeout); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	defer c.op.Unlock()
	if !c.hasEnded() {
		return fmt.Errorf("delete container %s: it has not ended: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	if err := c.deleteState(); err != nil {
		return fmt.Errorf("delete container %s: %w: %w", c.record.ID, errdefs.ErrUnavailable, err)
	}
	if err := c.removeFiles(); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	if init := c.process(); init != nil {
		_ = init.Close()
	}
	c.sup.forget(c.record.ID)
	c.publish(api.EventKind_EVENT_DELETED)
	return nil
}

// deleteState deletes the container as its runtime has it. Where that cannot be
// read, what the record names is removed.
func (c *container) deleteState() error {
	loaded, err := c.loaded()
	if err == nil {
		return loaded.Delete()
	}
	record := c.snapshot()
	if !errdefs.IsNotFound(err) {
		c.sup.log.Error("a container is deleted without its state", "container", record.ID, "error", err)
	}
	if err := runtime.RemoveCgroups(record.Cgroups); err != nil {
		return err
	}
	return c.sup.runtimeOf(record).Discard(record.ID)
}

func (c *container) removeFiles() error {
	var errs []error
	if !c.record.Bare {
		c.releaseOutputs()
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
