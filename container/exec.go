package container

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// ExecSync runs a command to its end or the time-out, if any, and captures its output. A failing command is no error.
func (s *Store) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (*client.ExecResult, error) {
	ctx, cancel := s.repeatable(ctx)
	defer cancel()
	c, supervisor, options, err := s.forExec(ctx, id, command, false)
	if err != nil {
		return nil, err
	}
	const outputLimit = 16<<20 - 1<<10 // both outputs share one message, of which clients take 16 MiB
	result, err := supervisor.ExecSync(ctx, options, timeout, outputLimit, &s.captured)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("exec %s in container %s: %w", CommandText(command), c.ID, err)
	}
	if result.TimedOut {
		return nil, fmt.Errorf("exec %s in container %s: not done within %v: %w", CommandText(command), c.ID, timeout, context.DeadlineExceeded)
	}
	if result.Cut {
		s.log(c).Warn("a part of the output of a command is missing: it wrote too much, or all commands together did",
			"command", CommandText(command), "kept", len(result.Stdout)+len(result.Stderr))
	}
	return result, nil
}

// CommandText names a command in errors, which are logged: without arguments, as they may be secrets.
func CommandText(command []string) string {
	switch len(command) {
	case 0:
		return "nothing"
	case 1:
		return fmt.Sprintf("%q", command[0])
	case 2:
		return fmt.Sprintf("%q with 1 argument", command[0])
	}
	return fmt.Sprintf("%q with %d arguments", command[0], len(command)-1)
}

// forExec returns what a command in a container needs. As with runc, a created container is enough.
func (s *Store) forExec(
	ctx context.Context, id string, command []string, tty bool,
) (c *Container, supervisor *client.Client, options client.ExecOptions, err error) {
	if c, supervisor, err = s.alive(ctx, id, created, running); err != nil {
		return nil, nil, options, err
	}
	if len(command) == 0 {
		return nil, nil, options, fmt.Errorf("cmd: is empty: %w", errdefs.ErrInvalidArgument)
	}
	template, err := s.execTemplate(c)
	if err != nil {
		return nil, nil, options, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	first := new(specs.Process)
	if err := json.Unmarshal(template.Process, first); err != nil {
		return nil, nil, options, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	process := oci.ForExec(first, command, tty)
	process.OOMScoreAdj = new(s.options.Machine.OOMScoreAdjNear(int(c.Resources().GetOomScoreAdj()))) // an update may have changed it
	// Its environment was checked when the container was made.
	if err := oci.CheckStrings(process.Args, nil, process.Rlimits, "cmd"); err != nil {
		return nil, nil, options, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	options = client.ExecOptions{Container: c.ID, Process: process, SELinux: template.Linux.MountLabel}
	return c, supervisor, options, nil
}

// execTemplate is the part of a container's spec that its commands share.
type execTemplate struct {
	Process json.RawMessage `json:"process"`
	Linux   struct {
		MountLabel string `json:"mountLabel"`
	} `json:"linux"`
}

// execTemplate reads the spec once, unless the environment is large.
func (s *Store) execTemplate(c *Container) (*execTemplate, error) {
	if kept := c.template.Load(); kept != nil {
		return kept, nil
	}
	data, err := os.ReadFile(filepath.Join(s.dir(c.ID), specFile))
	if err != nil {
		return nil, err
	}
	template := new(execTemplate)
	if err := json.Unmarshal(data, template); err != nil {
		return nil, err
	}
	const most = 16 << 10 // bytes that each container may keep
	if len(template.Process) <= most {
		c.template.Store(template)
	}
	return template, nil
}

const created, running = runtimeapi.ContainerState_CONTAINER_CREATED, runtimeapi.ContainerState_CONTAINER_RUNNING

// alive finds a container in one of the states, and its supervisor.
func (s *Store) alive(ctx context.Context, id string, states ...runtimeapi.ContainerState) (*Container, *client.Client, error) {
	c, err := s.Find(id)
	if err != nil {
		return nil, nil, err
	}
	if state := c.State(); !slices.Contains(states, state) {
		return nil, nil, fmt.Errorf("container %s is %s, and has to be %s: %w", c.ID, stateText(state), stateText(states...), errdefs.ErrFailedPrecondition)
	}
	supervisor, err := s.options.Supervisors.Ensure(ctx, c.Supervisor)
	return c, supervisor, err
}

// stateText names states in errors, such as created or running.
func stateText(states ...runtimeapi.ContainerState) string {
	var names []string
	for _, state := range states {
		names = append(names, strings.ToLower(strings.TrimPrefix(state.String(), "CONTAINER_")))
	}
	return strings.Join(names, " or ")
}

// Spec reads the runtime-spec from the file that the supervisor reads.
func (s *Store) Spec(c *Container) (*specs.Spec, error) {
	data, err := os.ReadFile(filepath.Join(s.dir(c.ID), specFile))
	if err != nil {
		return nil, err
	}
	spec := &specs.Spec{}
	return spec, json.Unmarshal(data, spec)
}

// ReopenLog continues in a new file at the log's path.
func (s *Store) ReopenLog(ctx context.Context, id string) error {
	c, supervisor, err := s.alive(ctx, id, running)
	if err != nil {
		return err
	}
	return supervisor.ReopenLog(ctx, c.ID)
}

// User returns the user of the first process, nil before it was made.
func (c *Container) User() *runtimeapi.ContainerUser {
	user := &runtimeapi.ContainerUser{}
	if !decode(c.Facts().User, user) {
		return nil
	}
	return user
}

// StopSignalName returns the CRI's name of the signal that Stop sends.
func (c *Container) StopSignalName() runtimeapi.Signal { return signalEnum(c.StopSignal) }

// Process is an exec, or a container that a client attaches to.
type Process struct {
	Outputs    []string // named as in supervisor/api; a terminal has one
	Stdin      bool
	supervisor *client.Client
	container  string
	exec       *client.Exec // nil: the container itself
}

// Input is the stdin of a process. CloseWrite ends it.
type Input interface {
	io.WriteCloser
	CloseWrite() error
}

// execInput is the input of an exec, which has no other use.
type execInput struct{ io.WriteCloser }

func (i execInput) CloseWrite() error { return i.Close() }

// CheckExec reports whether Exec can be called now.
func (s *Store) CheckExec(ctx context.Context, id string, command []string) error {
	_, _, _, err := s.forExec(ctx, id, command, false)
	return err
}

// Exec starts a command. The caller opens all Outputs, and Stdin if requested, then calls Wait.
func (s *Store) Exec(ctx context.Context, containerID string, command []string, stdin, tty bool) (*Process, error) {
	c, supervisor, options, err := s.forExec(ctx, containerID, command, tty)
	if err != nil {
		return nil, err
	}
	options.Stdin = stdin
	start, cancel := context.WithTimeout(ctx, s.options.Sandboxes.Limits().Create)
	defer cancel()
	exec, err := supervisor.Exec(start, options)
	if err != nil {
		return nil, fmt.Errorf("exec %s in container %s: %w", CommandText(command), c.ID, err)
	}
	return &Process{supervisor: supervisor, container: c.ID, exec: exec, Outputs: outputs(tty), Stdin: stdin}, nil
}

// CheckAttach reports whether Attach can be called now: the container runs, and has a terminal only if tty.
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
	c, supervisor, err := s.alive(ctx, id, running)
	if err != nil {
		return nil, err
	}
	return &Process{supervisor: supervisor, container: c.ID, Outputs: outputs(c.config.GetTty()), Stdin: c.config.GetStdin()}, nil
}

func outputs(tty bool) []string {
	if tty {
		return []string{api.Stdout}
	}
	return []string{api.Stdout, api.Stderr}
}

// IsExec reports whether the process is an exec, which waits for its client as for the reader of a pipe.
func (p *Process) IsExec() bool { return p.exec != nil }

// Output opens an output by its name.
func (p *Process) Output(ctx context.Context, name string) (io.ReadCloser, error) {
	if p.exec != nil {
		return p.exec.Outputs[name], nil
	}
	return p.supervisor.Attach(ctx, p.container, name)
}

// Input opens the input.
func (p *Process) Input(ctx context.Context) (Input, error) {
	if p.exec != nil {
		return execInput{p.exec.Stdin}, nil
	}
	return p.supervisor.Attach(ctx, p.container, api.Stdin)
}

// Resize sets the terminal's size in characters.
func (p *Process) Resize(ctx context.Context, width, height uint32) error {
	if p.exec == nil {
		return p.supervisor.Resize(ctx, p.container, width, height)
	}
	if p.exec.Resize == nil {
		return errdefs.ErrFailedPrecondition // it has no terminal
	}
	return p.exec.Resize(ctx, width, height)
}

// Wait returns the exit code of an exec, when the caller has read its outputs and closes delivered. When ctx ends before,
// it ends the exec with all that it started.
func (p *Process) Wait(ctx context.Context, delivered <-chan struct{}) (int32, error) {
	code, err := p.exec.Wait(ctx, delivered)
	if err != nil {
		p.exec.End(client.EndLimit)
		return 0, err
	}
	p.exec.Close()
	return code, nil
}
