package container

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// ExecSync runs a command to its end or the time-out, if any, and captures its output. A failing command is no error.
func (s *Store) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (*client.ExecResult, error) {
	ctx, cancel := s.repeatable(ctx)
	defer cancel()
	c, supervisor, process, err := s.forExec(ctx, id, command, false)
	if err != nil {
		return nil, err
	}
	const outputLimit = 16<<20 - 1<<10 // both outputs share one message, of which clients take 16 MiB
	result, err := supervisor.ExecSync(ctx, c.ID, process, timeout, outputLimit, &s.captured)
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
func (s *Store) forExec(ctx context.Context, id string, command []string, tty bool) (*Container, *client.Client, *specs.Process, error) {
	c, supervisor, err := s.alive(ctx, id, created, running)
	if err != nil {
		return nil, nil, nil, err
	}
	if len(command) == 0 {
		return nil, nil, nil, fmt.Errorf("cmd: is empty: %w", errdefs.ErrInvalidArgument)
	}
	spec, err := s.Spec(c)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	process := oci.ForExec(spec, command, tty)
	process.OOMScoreAdj = new(s.options.Machine.OOMScoreAdjNear(int(c.Resources().GetOomScoreAdj()))) // an update may have changed it
	// Its environment was checked when the container was made.
	if err := oci.CheckStrings(process.Args, nil, process.Rlimits, "cmd"); err != nil {
		return nil, nil, nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return c, supervisor, process, nil
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

// Process is an exec, or with an empty Exec a container, whose streams a client wants.
type Process struct {
	Exec       string // its id
	supervisor *client.Client
	container  string
	Outputs    []string // named as in supervisor/api; a terminal has one
	Stdin      bool
}

// CheckExec reports whether Exec can be called now.
func (s *Store) CheckExec(ctx context.Context, id string, command []string) error {
	_, _, _, err := s.forExec(ctx, id, command, false)
	return err
}

// Exec starts a command. The caller opens all Outputs, and Stdin if requested, then calls Wait, or else End.
func (s *Store) Exec(ctx context.Context, containerID string, command []string, stdin, tty bool) (*Process, error) {
	c, supervisor, spec, err := s.forExec(ctx, containerID, command, tty)
	if err != nil {
		return nil, err
	}
	p := &Process{supervisor: supervisor, container: c.ID, Exec: object.NewID(), Outputs: outputs(tty), Stdin: stdin}
	// The caller may go away: a started process must be known, so that it can be ended.
	start, cancel := s.outlive(ctx)
	defer cancel()
	if err := supervisor.ExecStart(start, p.container, p.Exec, spec, stdin); err != nil {
		return nil, fmt.Errorf("exec %s in container %s: %w", CommandText(command), c.ID, err)
	}
	return p, nil
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

// Stream opens a stream by its name (client.Client.Stream).
func (p *Process) Stream(ctx context.Context, name string) (*net.UnixConn, error) {
	return p.supervisor.Stream(ctx, p.container, p.Exec, name)
}

// Resize sets the terminal's size in characters.
func (p *Process) Resize(ctx context.Context, width, height uint32) error {
	return p.supervisor.Resize(ctx, p.container, p.Exec, width, height)
}

// Wait returns the exit code of an exec, after its outputs, or ends what it started when ctx ends.
func (p *Process) Wait(ctx context.Context) (int32, error) {
	return p.supervisor.ExecWait(ctx, p.container, p.Exec)
}

// End ends an exec whose client is gone, with all that it started.
func (p *Process) End(ctx context.Context) {
	p.supervisor.ExecEnd(ctx, p.container, p.Exec)
}
