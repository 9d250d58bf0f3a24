package client

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Shim is the protocol's unary calls.
type Shim struct{ rpc api.ShimClient }

// Create makes a container whose init waits at the exec barrier.
func (s Shim) Create(ctx context.Context, r *api.CreateRequest) (*api.CreateResponse, error) {
	answer, err := s.rpc.Create(ctx, r)
	return answer, native(err)
}

// Start lets the container's program run.
func (s Shim) Start(ctx context.Context, id string) error {
	_, err := s.rpc.Start(ctx, &api.StartRequest{Id: id})
	return native(err)
}

// Kill signals a container's init, or with all every process of it.
func (s Shim) Kill(ctx context.Context, id string, signal uint32, all bool) error {
	_, err := s.rpc.Kill(ctx, &api.KillRequest{Id: id, Signal: signal, All: all})
	return native(err)
}

// Delete removes a stopped container, or with kill one that runs.
// errdefs.ErrUnavailable says that processes do not go yet: call again.
func (s Shim) Delete(ctx context.Context, id string, kill bool) error {
	_, err := s.rpc.Delete(ctx, &api.DeleteRequest{Id: id, Kill: kill})
	return native(err)
}

// List returns all containers, in no order.
func (s Shim) List(ctx context.Context) ([]*api.Container, error) {
	answer, err := s.rpc.List(ctx, &api.Empty{})
	return answer.GetContainers(), native(err)
}

// Resize sets the size of a terminal; an empty exec is the container's.
func (s Shim) Resize(ctx context.Context, id, exec string, width, height uint32) error {
	_, err := s.rpc.Resize(ctx, &api.ResizeRequest{Id: id, ExecId: exec, Width: width, Height: height})
	return native(err)
}

// ReopenLog continues in a new file at the log's path.
func (s Shim) ReopenLog(ctx context.Context, id string) error {
	_, err := s.rpc.ReopenLog(ctx, &api.ReopenLogRequest{Id: id})
	return native(err)
}

// Update sets the named resources, and oom_score_adj if it is not nil; all or
// with an error none.
func (s Shim) Update(ctx context.Context, id string, resources *specs.LinuxResources, oomScoreAdj *int) error {
	encoded, err := json.Marshal(resources)
	if err != nil {
		return fmt.Errorf("update container %s: %w", id, err)
	}
	request := &api.UpdateRequest{Id: id, Resources: encoded}
	if oomScoreAdj != nil {
		request.OomScoreAdj = new(int32(*oomScoreAdj))
	}
	_, err = s.rpc.Update(ctx, request)
	return native(err)
}

// NoteExit passes on how the init of an adopted container has ended, which the
// caller has reaped: status is wait4(2)'s.
func (s Shim) NoteExit(ctx context.Context, id string, pid int, startTime uint64, status uint32) error {
	_, err := s.rpc.NoteExit(ctx, &api.NoteExitRequest{Id: id, Pid: int32(pid), StartTime: startTime, Status: status})
	return native(err)
}

// UseProgram has starters run another build of the program from now on.
func (s Shim) UseProgram(ctx context.Context, path string) error {
	_, err := s.rpc.UseProgram(ctx, &api.UseProgramRequest{Path: path})
	return native(err)
}

// Shutdown ends the supervisor. errdefs.ErrFailedPrecondition while it has
// containers.
func (s Shim) Shutdown(ctx context.Context) error {
	_, err := s.rpc.Shutdown(ctx, &api.Empty{})
	if err = native(err); errdefs.IsUnavailable(err) {
		return nil // it ended before it could answer
	}
	return err
}
