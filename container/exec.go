package container

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/shim/client"
)

// execOutputLimit is how much of a command's output is kept, in bytes: both
// outputs together travel in one message, of which clients take 16 MiB.
const execOutputLimit = 16<<20 - 1<<10

// ExecSync runs a command in a container, to its end or to the time-out
// (none if 0), and captures its output. A command that fails is no error.
func (s *Store) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (*client.Result, error) {
	ctx, cancel := s.repeatable(ctx)
	defer cancel()
	c, shim, process, err := s.forExec(ctx, id, command, false)
	if err != nil {
		return nil, err
	}
	result, err := shim.ExecSync(ctx, c.ID, process, timeout, execOutputLimit)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("exec %s in container %s: %w", CommandText(command), c.ID, err)
	}
	if result.TimedOut {
		return nil, fmt.Errorf("exec %s in container %s: not done within %v: %w", CommandText(command), c.ID, timeout, context.DeadlineExceeded)
	}
	return result, nil
}

// CommandText names a command in errors, which are logged, without its arguments:
// they may be secrets.
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

// forExec is what a command in a container needs. A container that was not
// started yet has its namespaces and files too, and takes commands, as runc's do.
func (s *Store) forExec(ctx context.Context, id string, command []string, tty bool) (*Container, *client.Client, *specs.Process, error) {
	c, shim, err := s.alive(ctx, id, created, running)
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
	if err := checkExec(process); err != nil {
		return nil, nil, nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return c, shim, process, nil
}

const (
	created = runtimeapi.ContainerState_CONTAINER_CREATED
	running = runtimeapi.ContainerState_CONTAINER_RUNNING
)

// alive finds a container that is in one of the states, and its supervisor.
func (s *Store) alive(ctx context.Context, id string, states ...runtimeapi.ContainerState) (*Container, *client.Client, error) {
	c, err := s.Find(id)
	if err != nil {
		return nil, nil, err
	}
	if state := c.State(); !slices.Contains(states, state) {
		return nil, nil, fmt.Errorf("container %s is %v, it has to be %v: %w", c.ID, state, states, errdefs.ErrFailedPrecondition)
	}
	shim, err := s.shimOf(ctx, c.group())
	return c, shim, err
}

// Spec is the container's runtime-spec, from the file that the supervisor reads.
func (s *Store) Spec(c *Container) (*specs.Spec, error) {
	data, err := os.ReadFile(filepath.Join(s.dir(c.ID), specFile))
	if err != nil {
		return nil, err
	}
	spec := &specs.Spec{}
	return spec, json.Unmarshal(data, spec)
}

// ReopenLog continues in a new file at the path of the container's log.
func (s *Store) ReopenLog(ctx context.Context, id string) error {
	c, shim, err := s.alive(ctx, id, running)
	if err != nil {
		return err
	}
	return shim.ReopenLog(ctx, c.ID)
}

// User is the user of the container's first process, nil before it was made. It
// must not be changed.
func (c *Container) User() *runtimeapi.ContainerUser { return c.shownUser.of(c.Facts().User) }

// StopSignalName is the signal that Stop sends, by the CRI's name.
func (c *Container) StopSignalName() runtimeapi.Signal { return signalEnum(c.StopSignal) }
