package serve

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/stdio"
)

// exec is a further process of a container.
type exec struct {
	container *container
	process   *runtime.Process
	pipes     *stdio.Pipes
	exited    chan struct{}
	code      int32       // set before exited is closed
	expire    *time.Timer // ends an exec that no client waits for
}

// startExec starts a process in a container that was created or started. The
// caller takes its outputs and ends it with release.
func (c *container) startExec(ctx context.Context, encoded []byte, stdin bool) (*exec, error) {
	ctx, done := c.bound(ctx)
	defer done()
	spec := new(specs.Process)
	if err := json.Unmarshal(encoded, spec); err != nil {
		return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	if status := c.state().Status; status != api.Status_STATUS_RUNNING && status != api.Status_STATUS_CREATED {
		return nil, fmt.Errorf("it is %v: %w", status, errdefs.ErrFailedPrecondition)
	}
	if err := c.endLeftExecs(); err != nil {
		return nil, err
	}
	e := &exec{container: c, exited: make(chan struct{})}
	if err := e.launch(ctx, spec, stdin); err != nil {
		if c.init.Exiting() {
			err = fmt.Errorf("it ended while the command was being started: %w: %w", errdefs.ErrFailedPrecondition, err)
		}
		return nil, err
	}
	go e.await()
	return e, nil
}

func (e *exec) launch(ctx context.Context, spec *specs.Process, stdin bool) (err error) {
	streams := runtime.Streams{Terminal: spec.Terminal}
	if spec.Terminal {
		e.pipes = stdio.NewTerminalPipes()
	} else {
		var ends stdio.Ends
		options := e.container.streamOptions()
		options.Stdin, options.SELinux = stdin, e.container.record.MountLabel
		if e.pipes, ends, err = stdio.OpenPipes(options); err != nil {
			return err
		}
		defer ends.Close()
		streams.Stdio = [3]*os.File{ends.Stdin, ends.Stdout, ends.Stderr}
	}
	if e.process, err = e.container.runtime.Exec(ctx, spec, e.container.init, streams); err != nil {
		e.pipes.Close()
		return err
	}
	if spec.Terminal {
		e.pipes.TakeTerminal(e.process.Terminal)
	}
	return nil
}

// await waits for the process.
func (e *exec) await() {
	status, known := e.process.Wait()
	e.code = exitCode(status)
	if !known {
		e.code = unknownExitCode
	}
	e.pipes.Finish()
	close(e.exited)
}

// release closes what is open. A process that has not ended, in D state for
// example, is waited for until it has: it would not be reaped otherwise.
func (e *exec) release() {
	e.pipes.Close()
	select {
	case <-e.exited:
		_ = e.process.Close()
	default:
		go func() { // ends with the process
			<-e.exited
			_ = e.process.Close()
		}()
	}
}

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
	if timeout := time.Duration(request.Timeout); timeout > 0 {
		var over func()
		ctx, over = context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not done within %v: %w", timeout, context.DeadlineExceeded))
		defer over()
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
	if ctx.Err() != nil { // nobody waits for it
		e.expire.Reset(0)
		return nil, context.Cause(ctx)
	}
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
	if err := e.awaitOrKill(ctx); err != nil {
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

// killTimeout is how long a killed process may take to be gone, in D state
// for example.
const killTimeout = 3 * time.Second

// awaitOrKill waits for the end of the process, and brings it about when ctx ends first.
func (e *exec) awaitOrKill(ctx context.Context) error {
	select {
	case <-e.exited:
		if ctx.Err() == nil {
			return nil
		}
	case <-ctx.Done():
	}
	if err := e.process.KillTree(); err != nil {
		return err
	}
	select {
	case <-e.exited:
		return nil
	case <-time.After(killTimeout): // D state: it ends when it can, and is reaped then
		return context.DeadlineExceeded
	}
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
