package container

import (
	"context"
	"fmt"
	"net"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/client"
)

// Process is a process whose streams a client wants: that of an exec, or with
// an empty exec the container's own.
type Process struct {
	shim      *client.Client
	container string
	exec      string
	// Outputs are the names of its outputs (shim/api): a terminal has one.
	Outputs []string
	// Stdin is set if it has one.
	Stdin bool
}

// CheckExec reports whether Exec can be called now: the container has not ended.
func (s *Store) CheckExec(ctx context.Context, id string, command []string) error {
	_, _, _, err := s.forExec(ctx, id, command, false)
	return err
}

// Exec starts a command in a container that was created or started. The caller opens
// all Outputs, and Stdin if asked for, then calls Wait; or End, if it cannot.
func (s *Store) Exec(ctx context.Context, containerID string, command []string, stdin, tty bool) (*Process, error) {
	c, shim, spec, err := s.forExec(ctx, containerID, command, tty)
	if err != nil {
		return nil, err
	}
	p := &Process{shim: shim, container: c.ID, exec: id.New(), Outputs: outputs(tty), Stdin: stdin}
	// To its end: a process that was started is known, and can be ended.
	start, cancel := s.outlive(ctx, s.limits.Load().Create)
	defer cancel()
	if err := shim.ExecStart(start, p.container, p.exec, spec, stdin); err != nil {
		return nil, fmt.Errorf("exec %s in container %s: %w", CommandText(command), c.ID, err)
	}
	return p, nil
}

// CheckAttach reports whether Attach can be called now: the container runs, and
// has a terminal or not, as the client believes.
func (s *Store) CheckAttach(ctx context.Context, id string, tty bool) error {
	c, _, err := s.alive(ctx, id, running)
	if err != nil {
		return err
	}
	if has := c.config.GetTty(); has != tty {
		return fmt.Errorf("tty: is %t, but that of container %s is %t: %w", tty, c.ID, has, errdefs.ErrInvalidArgument)
	}
	return nil
}

// Attach finds the process of a running container.
func (s *Store) Attach(ctx context.Context, id string) (*Process, error) {
	c, shim, err := s.alive(ctx, id, running)
	if err != nil {
		return nil, err
	}
	return &Process{shim: shim, container: c.ID, Outputs: outputs(c.config.GetTty()), Stdin: c.config.GetStdin()}, nil
}

func outputs(tty bool) []string {
	if tty {
		return []string{api.Stdout}
	}
	return []string{api.Stdout, api.Stderr}
}

// Stream opens a stream by its name; see client.Client.Stream.
func (p *Process) Stream(ctx context.Context, name string) (*net.UnixConn, error) {
	return p.shim.Stream(ctx, p.container, p.exec, name)
}

// Resize sets the size of its terminal, in characters.
func (p *Process) Resize(ctx context.Context, width, height uint32) error {
	return p.shim.Resize(ctx, p.container, p.exec, width, height)
}

// Wait returns the exit code of an exec, when its outputs are delivered. When
// ctx ends first, the exec does so with all that it started.
func (p *Process) Wait(ctx context.Context) (int32, error) {
	return p.shim.ExecWait(ctx, p.container, p.exec)
}

// End ends an exec whose client is gone, with all that it started.
func (p *Process) End(ctx context.Context) {
	p.shim.ExecEnd(ctx, p.container, p.exec)
}
