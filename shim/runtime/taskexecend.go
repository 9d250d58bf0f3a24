package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// execNote is a file that exists as long as the shim may have an exec that is waited
// for: a successor has no other way to know of one whose pid the shim had not said yet.
func (c *taskContainer) execNote(id string) string {
	return filepath.Join(c.bundle, taskExecNote+id)
}

const taskExecNote = "task-"

// forgetExec has the shim end an exec, if it runs, and forget it.
func (c *taskContainer) forgetExec(id string) {
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	if c.endExec(ctx, id) == nil {
		_ = os.Remove(c.execNote(id))
	}
}

// endNotedExecs ends the execs that the shim has of an earlier supervisor.
func (c *taskContainer) endNotedExecs() error {
	notes, err := namesIn(c.bundle, taskExecNote)
	if len(notes) == 0 {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	for _, note := range notes {
		id := strings.TrimPrefix(note, taskExecNote)
		if endErr := c.endExec(ctx, id); endErr != nil {
			err = errors.Join(err, fmt.Errorf("%s of container %s: %w", id, c.id, endErr))
			continue
		}
		err = errors.Join(err, os.Remove(c.execNote(id)))
	}
	return errors.Join(err, c.endLostExecs(ctx))
}

// endLostExecs ends the execs that the shim does not know, because its runtime was
// ended with the call that had asked for them. They are children of the shim beside
// init: what a container starts, and leaves, is reparented to the first process of its
// pid namespace. In that of the node it would be the shim's child, too.
func (c *taskContainer) endLostExecs(ctx context.Context) error {
	init, err := c.task.State(ctx, &task.StateRequest{ID: c.id})
	if err != nil {
		return taskError("state", err)
	}
	ofInit, err := pidNamespaceOf(int(init.GetPid()))
	if err != nil {
		return nil // it has ended, and they with it
	}
	_, path, known := tracker(c.known.Cgroups)
	if ofShim, err := pidNamespaceOf(c.known.Shim.PID); err != nil || ofShim == ofInit || !known {
		return err
	}
	pids, err := cgroups.GetPids(path)
	for _, pid := range pids {
		if pid != int(init.GetPid()) {
			err = errors.Join(err, c.killLostExec(pid))
		}
	}
	return err
}

func (c *taskContainer) killLostExec(pid int) error {
	p, err := openProcess(pid)
	if errors.Is(err, process.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	if parent, err := parentOf(pid); err != nil || parent != c.known.Shim.PID {
		return nil // it has ended, or is the container's
	}
	if err := p.Signal(unix.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

func pidNamespaceOf(pid int) (string, error) {
	return os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
}

// endExec kills an exec, and has the shim forget it, which it does once it has seen
// the end, and has none of a start that was under way.
func (c *taskContainer) endExec(ctx context.Context, id string) error {
	for {
		_, _ = c.task.Kill(ctx, &task.KillRequest{ID: c.id, ExecID: id, Signal: uint32(unix.SIGKILL)}) // it may have ended
		_, err := c.task.Delete(ctx, &task.DeleteRequest{ID: c.id, ExecID: id})
		if err = taskError("delete", err); err == nil || errdefs.IsNotFound(err) {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(execEndPause):
		}
	}
}

// execEndPause is between two looks whether the shim has reaped an exec.
const execEndPause = 20 * time.Millisecond
