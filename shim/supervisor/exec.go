package supervisor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/stdio"
)

// exec is a further process of a container.
type exec struct {
	container *container
	process   *runtime.Process
	pipes     *stdio.Pipes
	exited    chan struct{}
	code      int32       // set before exited is closed
	expire    *time.Timer // ends an exec that no client waits for; nil for execSync
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
	init := c.process()
	if init == nil {
		return nil, fmt.Errorf("its first process is not known yet, try again: %w", errdefs.ErrUnavailable)
	}
	e := &exec{container: c, exited: make(chan struct{})}
	if err := e.launch(ctx, init, spec, stdin); err != nil {
		return nil, c.execFailure(err)
	}
	go e.await()
	return e, nil
}

// execFailure says of a command that could not be started whether that is for the end
// of the container.
func (c *container) execFailure(err error) error {
	if init := c.process(); init != nil && init.Exiting() {
		return fmt.Errorf("it ended while the command was being started: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	return err
}

func (e *exec) launch(ctx context.Context, init *runtime.Process, spec *specs.Process, stdin bool) (err error) {
	streams := runtime.Streams{Terminal: spec.Terminal}
	if spec.Terminal {
		e.pipes = stdio.NewTerminalPipes(e.container.sup.shared)
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
	if e.process, err = e.container.runtime.Exec(ctx, spec, init, streams); err != nil {
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
