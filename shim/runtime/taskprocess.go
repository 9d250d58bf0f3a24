package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
)

// Exec is of Container. The process is put into a cgroup of its own as soon as it
// is there, and what it starts from then on with it.
func (c *taskContainer) Exec(spec *specs.Process, streams Streams) (*Process, error) {
	encoded, err := anyOf("Process", withOOMScoreAdj(c.bundle, spec))
	if err = errors.Join(err, checkText(spec)); err != nil {
		return nil, err
	}
	console, err := newTaskConsole(streams)
	if err != nil {
		return nil, err
	}
	defer console.close()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	go cgroup.KeepLockWarm(ctx)
	id := newExecID()
	if err := os.WriteFile(c.execNote(id), nil, 0o600); err != nil {
		return nil, err
	}
	_, err = c.task.Exec(ctx, &task.ExecProcessRequest{
		ID: c.id, ExecID: id, Spec: encoded, Terminal: streams.Terminal, Stdin: console.stdin, Stdout: console.stdout, Stderr: console.stderr,
	})
	if err != nil {
		c.forgetExec(id)
		return nil, taskError("exec", err)
	}
	started, err := c.task.Start(ctx, &task.StartRequest{ID: c.id, ExecID: id})
	if err != nil {
		c.forgetExec(id)
		return nil, taskError("exec", err)
	}
	p, err := c.foundExec(int(started.GetPid()), id)
	if err != nil {
		c.forgetExec(id)
		return nil, err
	}
	p.Terminal = console.take()
	return p, nil
}

// MountLabel is of Container: none, as a shim makes the pipes that its processes have
// and copies what goes through them.
func (*taskContainer) MountLabel() string { return "" }

// anyOf is a part of a runtime-spec, as containerd's typeurl names it.
func anyOf(kind string, value any) (*anypb.Any, error) {
	encoded, err := json.Marshal(value)
	return &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/" + kind, Value: encoded}, err
}

// foundInit opens the init that the shim has started, and finds its cgroups.
func (c *taskContainer) foundInit(pid int, cgroupsPath string) (*Process, error) {
	p, err := c.open(pid)
	if err != nil {
		return nil, err
	}
	found, err := cgroupsOf(pid)
	if err == nil {
		c.known.Cgroups = ofContainer(found, cgroupsPath)
		err = writeJSON(c.file(), c.known)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cgroups of container %s: %w", c.id, err), p.Close())
	}
	c.execCgroups = newExecCgroups(c.known.Cgroups, c.bundle)
	p.reap = func() (syscall.WaitStatus, bool) { return c.exitOf(p, "") }
	return p, nil
}

// foundExec opens an exec that the shim has started. One that has ended already is
// known to the shim, which is its parent.
func (c *taskContainer) foundExec(pid int, id string) (*Process, error) {
	p, err := c.open(pid)
	switch {
	case errors.Is(err, process.ErrGone):
		p = &Process{PID: pid}
	case err != nil:
		return nil, err
	default:
		p.tree = c.execCgroups.newTree()
		if p.tree != nil {
			p.tree.take(pid)
		}
	}
	p.reap = func() (syscall.WaitStatus, bool) { return c.exitOf(p, id) }
	p.Relay = c.relay(id)
	return p, nil
}

// open opens a process that the shim says it has started: it has to be one of its
// own. What runs in a machine of its own is none of this node.
func (c *taskContainer) open(pid int) (*Process, error) {
	if pid == c.known.Shim.PID {
		return nil, fmt.Errorf("the containers of this shim are no processes of the node, which handlers of type shim need: %w", errdefs.ErrNotImplemented)
	}
	p, err := openProcess(pid)
	if err != nil {
		return nil, fmt.Errorf("the shim's process: %w", err)
	}
	if pid <= 1 || !descends(pid, c.known.Shim.PID) {
		if errors.Is(p.Signal(0), os.ErrProcessDone) { // the shim has reaped it meanwhile
			return nil, errors.Join(fmt.Errorf("the shim's process %d: %w", pid, process.ErrGone), p.Close())
		}
		return nil, errors.Join(fmt.Errorf("the shim of container %s says that it has started process %d, which is not one of its own", c.id, pid), p.Close())
	}
	return p, nil
}

// exitOf asks the shim, which is the parent, for the exit of an ended process,
// and has it forget an exec. What the kernel says is preferred (Linux 6.15):
// the shim's number does not tell a signal from an exit.
func (c *taskContainer) exitOf(p *Process, exec string) (syscall.WaitStatus, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	answered := make(chan *task.WaitResponse, 1)
	go func() {
		defer cancel()
		answer, err := c.task.Wait(ctx, &task.WaitRequest{ID: c.id, ExecID: exec})
		if err != nil {
			answer = nil
		}
		answered <- answer
		if exec != "" && err == nil {
			_, _ = c.task.Delete(ctx, &task.DeleteRequest{ID: c.id, ExecID: exec})
			_ = os.Remove(c.execNote(exec))
		}
	}()
	for {
		var answer *task.WaitResponse
		over := false
		select {
		case answer = <-answered:
			over = true
		case <-time.After(kernelExitPause):
		}
		if p.pidfd != nil {
			if exact, ok := p.KernelExit(); ok {
				return exact, true // whether the shim answers or not
			}
		}
		if over {
			return statusOf(answer.GetExitStatus()), answer != nil
		}
	}
}

// kernelExitPause is between two looks whether the shim has reaped a process.
const kernelExitPause = 5 * time.Millisecond

// statusOf is a status that says what a shim's number does, which is 128 and the
// signal for a process that was ended by one.
func statusOf(code uint32) syscall.WaitStatus { return syscall.WaitStatus(code&0xff) << 8 }
