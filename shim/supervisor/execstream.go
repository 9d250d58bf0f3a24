package supervisor

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/shim/api"
)

// execWaitTimeout is how long an exec may run without a client that waits.
const execWaitTimeout = 30 * time.Second

// execStart starts a process whose streams are then opened one by one.
func (c *container) execStart(ctx context.Context, request *api.ExecStartRequest) (*exec, error) {
	c.mu.Lock()
	taken := c.execs[request.ExecId] != nil
	c.mu.Unlock()
	if taken || request.ExecId == "" {
		return nil, fmt.Errorf("exec %q in container %s: %w", request.ExecId, request.Id, errdefs.ErrAlreadyExists)
	}
	e, err := c.startExec(ctx, request.Process, request.Stdin)
	if err != nil {
		return nil, err
	}
	e.expire = time.AfterFunc(execWaitTimeout, func() {
		_ = e.process.KillTree()
		c.forgetExec(request.ExecId)
		e.release()
	})
	c.mu.Lock()
	c.execs[request.ExecId] = e
	c.mu.Unlock()
	return e, nil
}

// execWait waits for the end of a process and of its opened outputs, and
// forgets it. A client that goes away takes the process with it.
func (c *container) execWait(ctx context.Context, id string) (int32, error) {
	e, err := c.findExec(id)
	if err != nil {
		return 0, err
	}
	e.expire.Stop()
	defer e.release()
	defer c.forgetExec(id)
	if _, err := e.awaitOrKill(ctx, 0); err != nil {
		return 0, err
	}
	delivered := make(chan struct{})
	go func() {
		defer close(delivered)
		e.pipes.AwaitOutput()
	}()
	select {
	case <-delivered:
	case <-ctx.Done(): // release closes the pipes, which ends the pumps
	}
	return e.code, nil
}

func (c *container) findExec(id string) (*exec, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.execs[id]; e != nil {
		return e, nil
	}
	return nil, fmt.Errorf("exec %s in container %s: %w", id, c.record.ID, errdefs.ErrNotFound)
}

func (c *container) forgetExec(id string) {
	c.mu.Lock()
	delete(c.execs, id)
	c.mu.Unlock()
}
