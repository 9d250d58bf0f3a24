package serve

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
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
