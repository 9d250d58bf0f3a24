package runtime

import (
	"context"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
)

// Start is of Container.
func (c *taskContainer) Start() error {
	ctx, cancel := context.WithTimeout(context.Background(), longRun)
	defer cancel()
	c.setStarting(cancel)
	defer c.setStarting(nil)
	_, err := c.task.Start(ctx, &task.StartRequest{ID: c.id})
	return taskError("start", err)
}

func (c *taskContainer) setStarting(cancel context.CancelFunc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.starting = cancel
}

// abortStart gives up a start that a shim does not answer although the container
// is killed.
func (c *taskContainer) abortStart() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.starting != nil {
		c.aborted.Store(true)
		time.AfterFunc(abortTimeout, c.starting)
	}
}

// Started is of Container: the runtime behind the shim has run the hooks.
func (*taskContainer) Started() error { return nil }
