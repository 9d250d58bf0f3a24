package serve

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/runtime"
)

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
		if killErr := c.signalInit(sig); !errors.Is(killErr, os.ErrProcessDone) {
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

func (c *container) signalInit(sig syscall.Signal) error {
	if init := c.process(); init != nil {
		return init.Signal(sig)
	}
	record := c.snapshot()
	init, err := runtime.Find(record.PID, record.StartTime)
	if errors.Is(err, process.ErrGone) {
		return os.ErrProcessDone
	}
	if err != nil {
		return err
	}
	return errors.Join(init.Signal(sig), init.Close())
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
