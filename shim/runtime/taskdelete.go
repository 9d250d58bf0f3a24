package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Delete is of Container. A shim that does not answer is ended by its own verb
// "delete", which also removes what its runtime has of the container.
func (c *taskContainer) Delete() error {
	if err := killCgroup(c.known.Cgroups, "", unix.SIGKILL); err != nil {
		return err
	}
	err := c.deleteByShim()
	if err != nil && c.made {
		err = c.runtime.children.during(func() error { return c.runtime.remove(c.id, c.bundle) })
	} else if !c.made {
		err = nil // there is no more than a shim, which has ended
	}
	if c.close != nil {
		err = errors.Join(err, c.close())
	}
	if c.log != nil {
		c.log.close()
	}
	if err != nil {
		return fmt.Errorf("delete container %s: %w", c.id, err)
	}
	return c.runtime.removeBundle(c.bundle)
}

// removeBundle removes a container's directory, and with the last one those of
// the runtime.
func (r *Task) removeBundle(bundle string) error {
	r.dirs.Lock()
	defer r.dirs.Unlock()
	if err := os.RemoveAll(bundle); err != nil {
		return err
	}
	for _, dir := range []string{filepath.Join(filepath.Dir(r.bundles), "runc", taskNamespace), filepath.Join(filepath.Dir(r.bundles), "runc"), r.bundles, filepath.Dir(r.bundles), filepath.Dir(filepath.Dir(r.bundles))} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			break // it is not empty
		}
	}
	return nil
}

func (r *Task) makeBundle(bundle string) error {
	r.dirs.Lock()
	defer r.dirs.Unlock()
	return os.MkdirAll(bundle, 0o700)
}

func (c *taskContainer) deleteByShim() error {
	if c.task == nil {
		return errdefs.ErrUnavailable
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	_, _ = c.task.Kill(ctx, &task.KillRequest{ID: c.id, Signal: uint32(unix.SIGKILL), All: true}) // it may have ended
	_, err := c.task.Delete(ctx, &task.DeleteRequest{ID: c.id})
	if err = taskError("delete", err); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	// Refused while the shim has other containers of the pod; answered or not, the
	// connection ends with it.
	_, _ = c.task.Shutdown(ctx, &task.ShutdownRequest{ID: c.id})
	return nil
}
