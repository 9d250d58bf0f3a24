package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/stdio"
)

// awaitInit waits for a container's init and records its end.
func (c *container) awaitInit() {
	_ = c.init.Ended()
	close(c.ended)
	ended := time.Now()
	status, known := c.init.Wait()
	c.finish(ended, status, known)
}

// finish records the end of init: what else runs in the container is ended, the
// exit is written and reported, however long the streams take.
func (c *container) finish(ended time.Time, status syscall.WaitStatus, known bool) {
	exit := &api.ExitRecord{
		Code: exitCode(status), CodeKnown: known, FinishedAt: ended.UnixNano(), PID: c.snapshot().PID,
		OOMKilled: known && c.killedByOOM(status),
	}
	if !known {
		exit.Code = unknownExitCode
	}
	c.endRest()
	if c.triedToStart() && known && status.Exited() {
		c.drain() // init has said there why it could not
		exit.StartError = c.startError()
	}
	if !c.record.Bare {
		if err := writeJSON(c.sup.exitPath(c.record.ID), exit); err != nil {
			c.sup.log.Error("the exit of a container is not on disk", "container", c.record.ID, "error", err)
		}
	}
	c.drain()
	c.mu.Lock()
	c.exit = exit
	c.mu.Unlock()
	close(c.exited)
	if c.snapshot().StartedAt != 0 && exit.StartError == "" {
		c.announceStart()
	}
	c.publish(api.EventKind_EVENT_EXITED)
}

// endRest kills what init leaves behind. With a pid namespace of the container's
// own nothing is left: the kernel ends all processes with the first one
// (pid_namespaces(7)). In one that it shares they would run on, with its ports
// and locks.
func (c *container) endRest() {
	time.AfterFunc(startGrace, c.abandon)
	if err := c.signalAll(syscall.SIGKILL); err != nil {
		c.sup.log.Warn("processes of a container that has ended may still run", "container", c.snapshot().ID, "error", err)
	}
}

// startGrace is how long the start of a container may take that has ended meanwhile: a
// hook that hangs would keep it from being deleted.
const startGrace = 5 * time.Second

// drainTimeout is how long the event of a container's end waits for its output to
// be in the log: people look there when they hear of it.
const drainTimeout = 500 * time.Millisecond

// drain ends the streams. A disk that hangs keeps them longer than that, in a
// goroutine that ends with the last write.
func (c *container) drain() {
	if c.follow == nil && c.streams() == nil {
		return
	}
	c.drained.Do(func() {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if c.follow != nil {
				<-c.ioAdopted
			}
			c.streams().Drain()
		}()
		select {
		case <-done:
		case <-time.After(drainTimeout):
		}
	})
}

// unknownExitCode stands for an exit status that is lost, as in containerd.
const unknownExitCode = 255

// exitCode is the shell's: 128 + signal for a killed process.
func exitCode(status syscall.WaitStatus) int32 {
	if status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(status.ExitStatus())
}

// kill signals init, or every process of the container. A signal to a stopped
// container is ErrNotFound.
func (c *container) kill(sig syscall.Signal, all bool) error {
	c.mu.Lock()
	stopped := c.exit != nil
	c.killed = c.killed || sig == syscall.SIGKILL
	c.mu.Unlock()
	if stopped {
		return fmt.Errorf("kill container %s: it has ended: %w", c.record.ID, errdefs.ErrNotFound)
	}
	var err error
	if all && sig == syscall.SIGKILL {
		c.abandon() // a start or an exec that is under way
	}
	if all {
		err = c.signalAll(sig)
	}
	// A privileged init may have moved to a cgroup outside.
	if !all || sig == syscall.SIGKILL {
		if killErr := c.init.Signal(sig); !errors.Is(killErr, os.ErrProcessDone) {
			err = errors.Join(err, killErr)
		}
	}
	if err != nil {
		return fmt.Errorf("kill container %s: %w", c.record.ID, err)
	}
	return nil
}

// signalAll signals every process of the container.
func (c *container) signalAll(sig syscall.Signal) error {
	return c.snapshot().Cgroups.Signal(sig)
}

// end kills a container that runs, and waits until it has ended.
func (c *container) end() error {
	if err := c.kill(syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case <-c.exited:
		return nil
	case <-time.After(killTimeout):
		return fmt.Errorf("end container %s: it still runs %v after SIGKILL: %w", c.record.ID, killTimeout, errdefs.ErrUnavailable)
	}
}

// delete removes a stopped container. It may be called again after an error.
func (c *container) delete(ctx context.Context) error {
	waiting, over := context.WithTimeoutCause(ctx, killTimeout, fmt.Errorf("another operation on it is not done within %v: %w", killTimeout, errdefs.ErrUnavailable))
	defer over()
	if c.op.Acquire(waiting, 1) != nil { // a hook that hangs may hold it
		return fmt.Errorf("delete container %s: %w", c.record.ID, context.Cause(waiting))
	}
	defer c.op.Release(1)
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

// removeUnreadable removes the files of a container which is left alone because its
// record cannot be used, and which the daemon deletes.
func (s *Supervisor) removeUnreadable(id string) error {
	var errs []error
	for _, pattern := range []string{runtime.StatesDir, filepath.Join(runtime.ProgramsDir, "*")} {
		found, _ := filepath.Glob(filepath.Join(s.dir, pattern, id)) // a good pattern
		for _, path := range found {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	return errors.Join(append(errs, stdio.RemoveFifos(filepath.Join(s.dir, api.StreamDir), id), os.RemoveAll(s.exitPath(id)), s.removeRecord(id))...)
}
