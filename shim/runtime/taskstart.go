package runtime

import (
	"context"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
)

// StartHooks is of StartHooked.
func (c *taskContainer) StartHooks() (names string, limit time.Duration) {
	return startHooks(c.bundle)
}

// Start is of Container.
func (c *taskContainer) Start() error {
	ctx, cancel := context.WithTimeout(context.Background(), longRun)
	defer cancel()
	c.setStarting(cancel)
	defer c.hasStarted()
	_, err := c.task.Start(ctx, &task.StartRequest{ID: c.id})
	return taskError("start", err)
}

func (c *taskContainer) setStarting(cancel context.CancelFunc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.starting = cancel
}

// hasStarted stops what was to end a start that has returned now.
func (c *taskContainer) hasStarted() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.starting = nil
	for _, timer := range c.aborts {
		timer.Stop()
	}
}

// Abort is of Aborter: a start that the shim still does not answer then is given up.
func (c *taskContainer) Abort() {
	endHelpers(c.known.Shim.PID, c.id)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.starting != nil {
		c.aborted.Store(true)
		c.aborts = append(c.aborts, time.AfterFunc(abortTimeout, c.starting))
	}
}

// AbortStart is of Aborter.
func (c *taskContainer) AbortStart(after time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.starting != nil {
		c.aborts = append(c.aborts, time.AfterFunc(after, func() {
			if c.isStarting() { // a container is started once
				c.Abort()
			}
		}))
	}
}

func (c *taskContainer) isStarting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.starting != nil
}

// Started is of Container: the runtime behind the shim has run the hooks.
func (*taskContainer) Started() error { return nil }
