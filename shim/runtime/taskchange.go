package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Update is of Container; see commandContainer.Update.
func (c *taskContainer) Update(wanted *specs.LinuxResources, oomScoreAdj *int) (err error) {
	undo := func() error { return nil }
	if oomScoreAdj != nil {
		if undo, err = setOOMScoreAdj(c.known.Cgroups, *oomScoreAdj); err != nil {
			return err
		}
	}
	resources, err := anyOf("LinuxResources", wanted)
	if err != nil {
		return err
	}
	before := readLimits(c.known.Cgroups, wanted.Unified)
	if err := tryLimits(c.known.Cgroups, alone(wanted)); err != nil {
		return errors.Join(err, before.restore(), undo())
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if _, err := c.task.Update(ctx, &task.UpdateTaskRequest{ID: c.id, Resources: resources}); err != nil {
		return errors.Join(taskError("update", err), before.restore(), undo())
	}
	return keepOOMScoreAdj(c.bundle, oomScoreAdj)
}

// Delete is of Container. A shim that does not answer is killed; then its own verb
// "delete" removes what its runtime has of the container.
func (c *taskContainer) Delete() error {
	if err := killCgroup(c.known.Cgroups, "", unix.SIGKILL); err != nil {
		return err
	}
	err := c.deleteByShim()
	if err != nil {
		c.endShim()
	}
	if err != nil && c.made || c.aborted.Load() {
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
	limit := endLimit
	if c.aborted.Load() {
		limit = abortTimeout // it has not answered for long
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_, _ = c.task.Kill(ctx, &task.KillRequest{ID: c.id, Signal: uint32(unix.SIGKILL), All: true}) // it may have ended
	_, err := c.task.Delete(ctx, &task.DeleteRequest{ID: c.id})
	if err = taskError("delete", err); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	// Refused while the shim has other containers of the pod; the connection ends
	// with it.
	_, _ = c.task.Shutdown(ctx, &task.ShutdownRequest{ID: c.id})
	if ctx.Err() != nil && !c.sharesShim() {
		c.endShim() // the container is deleted, and no other needs it
	}
	return nil
}

// sharesShim reports whether the shim has another container, or may have one whose
// file cannot be read.
func (c *taskContainer) sharesShim() bool {
	bundles, err := os.ReadDir(c.runtime.bundles)
	for _, bundle := range bundles {
		if bundle.Name() == c.id {
			continue
		}
		var other taskKnown
		content, readErr := os.ReadFile(filepath.Join(c.runtime.bundles, bundle.Name(), taskFile))
		if readErr == nil {
			readErr = json.Unmarshal(content, &other)
		}
		switch {
		case errors.Is(readErr, os.ErrNotExist): // it is being made, or removed
		case readErr != nil || other.Shim == c.known.Shim:
			return true
		}
	}
	return err != nil && !errors.Is(err, os.ErrNotExist)
}

// longestError is how much of an error of a shim's is passed on.
const longestError = 2000

// shortened is an error whose text is not passed on as a whole.
type shortened struct{ error }

// Error is at most longestError long.
func (e shortened) Error() string {
	text := e.error.Error()
	if len(text) <= longestError {
		return text
	}
	return strings.ToValidUTF8(text[:longestError], "?") + " ..."
}

// Unwrap keeps the error's kind.
func (e shortened) Unwrap() error { return e.error }

// taskError is an error of a shim with its kind.
func taskError(verb string, err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("shim: %s: %w", verb, shortened{errgrpc.ToNative(err)})
	if lacksRuntime(err.Error()) {
		return fmt.Errorf("the shim found no runtime: install it in a directory of PATH (%s): %w: %w", os.Getenv("PATH"), err, errdefs.ErrUnavailable)
	}
	if isContainersFault(err.Error()) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}

// lacksRuntime reports whether containerd-shim-runc-v2 could not run its runtime: it
// says then that it has no error of it to pass on (go-runc and its runtimeError).
func lacksRuntime(message string) bool {
	return strings.Contains(message, "unable to retrieve OCI runtime error") &&
		(strings.Contains(message, "executable file not found in $PATH") || strings.Contains(message, "fork/exec"))
}
