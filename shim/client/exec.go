package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/shim/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Result is what a process that ran to its end has left.
type Result struct {
	Stdout, Stderr []byte
	Code           int32 // 128 + signal if killed by one
	TimedOut       bool  // its whole process tree was ended
	Truncated      bool  // there was more output than asked for
}

// ExecSync runs a process to its end, or to its time-out (none if 0), and
// captures limit bytes of both outputs together. It does not wait for a background child
// that keeps an output open. A cancelled ctx ends the process and all that it
// started.
func (c *Client) ExecSync(ctx context.Context, id string, process *specs.Process, timeout time.Duration, limit uint64) (*Result, error) {
	encoded, err := json.Marshal(process)
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", id, err)
	}
	if timeout <= 0 || timeout > math.MaxInt64-execSlack {
		return c.execSync(ctx, id, encoded, timeout, limit)
	}
	limited, cancel := context.WithTimeout(ctx, timeout+execSlack)
	defer cancel()
	result, err := c.execSync(limited, id, encoded, timeout, limit)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		go c.peer.killIfHung() // ends with the limit of an answer
		return &Result{Code: killedCode, TimedOut: true}, nil
	}
	return result, err
}

const (
	// execSlack is how long a supervisor may take to end what a time-out ends.
	execSlack = 5 * time.Second
	// killedCode is 128 + SIGKILL.
	killedCode = 137
)

func (c *Client) execSync(ctx context.Context, id string, process []byte, timeout time.Duration, limit uint64) (*Result, error) {
	ctx, call, done, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	stream, err := call.ExecSync(ctx, &api.ExecSyncRequest{
		Id: id, Process: process, Timeout: int64(timeout), OutputCap: limit,
	})
	if err != nil {
		return nil, native(err)
	}
	return collect(stream)
}

func collect(stream api.Shim_ExecSyncClient) (*Result, error) {
	// As they come: a consumer that is slow, such as a buffer that grows, loses
	// the stream (ttrpc, ErrStreamFull).
	var stdout, stderr [][]byte
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("the shim ended an exec without its exit: %w", errdefs.ErrUnavailable)
		}
		if err != nil {
			return nil, native(err)
		}
		stdout, stderr = append(stdout, message.Stdout), append(stderr, message.Stderr)
		if exit := message.Exit; exit != nil {
			return &Result{
				Stdout: bytes.Join(stdout, nil), Stderr: bytes.Join(stderr, nil),
				Code: exit.Code, TimedOut: exit.TimedOut, Truncated: exit.Truncated,
			}, nil
		}
	}
}

// ExecStart starts a process, by an id that is unique in the container. Open
// its streams, then ExecWait: within 30 s, or it is ended.
func (c *Client) ExecStart(ctx context.Context, id, exec string, process *specs.Process, stdin bool) error {
	encoded, err := json.Marshal(process)
	if err != nil {
		return fmt.Errorf("exec in container %s: %w", id, err)
	}
	_, err = c.rpc.ExecStart(ctx, &api.ExecStartRequest{Id: id, ExecId: exec, Process: encoded, Stdin: stdin})
	return native(err)
}

// ExecWait returns the exit code when a process has ended and its opened
// outputs are delivered. A cancelled ctx ends the process and all that it
// started.
func (c *Client) ExecWait(ctx context.Context, id, exec string) (int32, error) {
	code, err := c.execWait(ctx, id, exec)
	if err != nil && ctx.Err() != nil {
		c.ExecEnd(ctx, id, exec) // the call may not have reached the supervisor
	}
	return code, err
}

// endTime is how long the supervisor may take to end a process. It may be busy.
const endTime = 10 * time.Second

// ExecEnd ends an exec whose client is gone, and all that it started, also when
// ctx has ended.
func (c *Client) ExecEnd(ctx context.Context, id, exec string) {
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	// Fails if the process has ended, or its supervisor, whose successor ends it.
	_ = c.ExecKill(end, id, exec, uint32(unix.SIGKILL), true)
	_, _ = c.execWait(end, id, exec)
}

func (c *Client) execWait(ctx context.Context, id, exec string) (int32, error) {
	ctx, call, done, err := c.open(ctx)
	if err != nil {
		return 0, err
	}
	defer done()
	answer, err := call.ExecWait(ctx, &api.ExecWaitRequest{Id: id, ExecId: exec})
	return answer.GetCode(), native(err)
}

// ExecKill signals an exec, or with all everything that it started too.
func (c *Client) ExecKill(ctx context.Context, id, exec string, signal uint32, all bool) error {
	_, err := c.rpc.Kill(ctx, &api.KillRequest{Id: id, ExecId: exec, Signal: signal, All: all})
	return native(err)
}
