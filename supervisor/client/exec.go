package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// ExecResult is what a process has left that ran to its end.
type ExecResult struct {
	Stdout, Stderr []byte
	Code           int32 // 128 + signal if killed by one
	TimedOut       bool  // its whole process tree was ended
	Cut            bool  // a part of the outputs is missing
}

// ExecSync runs a process to its end or time-out (none if 0), and captures limit bytes of both outputs together, or
// less while all calls have captured much. It does not wait for background children that are silent. A cancelled
// ctx ends the process and all it started.
func (c *Client) ExecSync(ctx context.Context, id string, process *specs.Process, timeout time.Duration, limit int64, all *Captured) (*ExecResult, error) {
	began, exec := time.Now(), rand.Text()
	start, bounded := ctx, ctx
	if timeout > 0 && timeout < math.MaxInt64-execSlack {
		var over func()
		start, over = context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not done within %v: %w", timeout, context.DeadlineExceeded))
		defer over()
		bounded, over = context.WithTimeout(ctx, timeout+execSlack)
		defer over()
	}
	if err := c.ExecStart(start, id, exec, process, false); err != nil {
		return nil, err
	}
	var timedOut atomic.Bool
	if start != ctx {
		late := time.AfterFunc(timeout-time.Since(began), func() {
			timedOut.Store(true)
			_ = c.ExecKill(bounded, id, exec, uint32(unix.SIGKILL), true) // it has ended, or ends with the connection
		})
		defer late.Stop()
	}
	output, code := &capture{all: all, limit: int(limit)}, int32(0)
	err := output.open(bounded, c, id, exec)
	if err == nil {
		code, err = c.execWait(bounded, id, exec)
	}
	if err != nil {
		go func() { // within endLimit
			c.ExecEnd(ctx, id, exec)
			output.close() // not before: without a reader the command may end, and its children live on
		}()
		if ended(bounded) && ctx.Err() == nil {
			return &ExecResult{Code: 128 + int32(unix.SIGKILL), TimedOut: true}, nil
		}
		return nil, err
	}
	defer context.AfterFunc(bounded, output.close)()
	output.work.Wait()
	defer output.close()
	result := output.result()
	result.Code, result.TimedOut = code, timedOut.Load()
	return &result, nil
}

// ExecStart starts a process, by a new id. Open its streams, and ExecWait within 30 s, or it is ended.
func (c *Client) ExecStart(ctx context.Context, id, exec string, process *specs.Process, stdin bool) error {
	var encoded bytes.Buffer
	encoder := json.NewEncoder(&encoded)
	encoder.SetEscapeHTML(false) // for which a "<" has six bytes; ttrpc takes messages of 4 MiB
	if err := encoder.Encode(process); err != nil {
		return fmt.Errorf("exec in container %s: %w", id, err)
	}
	call, done, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer done()
	_, err = call.ExecStart(ctx, &api.ExecStartRequest{Id: id, ExecId: exec, Process: encoded.Bytes(), Stdin: stdin})
	if err != nil && ended(ctx) {
		go c.ExecEnd(ctx, id, exec) // it may have been started; within endLimit
		return context.Cause(ctx)
	}
	return native(err)
}

// ended reports whether ctx has ended. On a busy machine its timer may be late, so that a supervisor with the same limit
// answers first.
func ended(ctx context.Context) bool {
	if limit, limited := ctx.Deadline(); limited && !time.Now().Before(limit) {
		<-ctx.Done()
	}
	return ctx.Err() != nil
}

// ExecWait returns the exit code when a process has ended and its opened outputs are delivered. When ctx is
// cancelled, the process and all it started are ended.
func (c *Client) ExecWait(ctx context.Context, id, exec string) (int32, error) {
	code, err := c.execWait(ctx, id, exec)
	if err != nil && ended(ctx) {
		c.ExecEnd(ctx, id, exec) // the call may not have reached the supervisor
	}
	return code, err
}

func (c *Client) execWait(ctx context.Context, id, exec string) (int32, error) {
	call, done, err := c.open(ctx)
	if err != nil {
		return 0, err
	}
	defer done()
	answer, err := call.ExecWait(ctx, &api.ExecWaitRequest{Id: id, ExecId: exec})
	return answer.GetCode(), native(err)
}

// ExecEnd ends an exec whose client is gone, and all that it started, also when ctx has ended.
func (c *Client) ExecEnd(ctx context.Context, id, exec string) {
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endLimit) // the supervisor may be busy
	defer cancel()
	// Fails if the process has ended, or its supervisor, whose successor ends it.
	_ = c.ExecKill(end, id, exec, uint32(unix.SIGKILL), true)
	_, _ = c.rpc.ExecWait(end, &api.ExecWaitRequest{Id: id, ExecId: exec})
}

// ExecKill signals an exec, or with all everything that it started too.
func (c *Client) ExecKill(ctx context.Context, id, exec string, signal uint32, all bool) error {
	_, err := c.rpc.Kill(ctx, &api.KillRequest{Id: id, ExecId: exec, Signal: signal, All: all})
	return native(err)
}

// Stream opens api.Stdin, api.Stdout or api.Stderr of an exec, or with an empty exec of the container
// itself: attach. The connection carries the stream's bytes; CloseWrite on stdin is its end.
func (c *Client) Stream(ctx context.Context, id, exec, stream string) (*net.UnixConn, error) {
	conn, err := c.host.DialStream(ctx, c.dir)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer context.AfterFunc(c.life, func() { _ = conn.Close() })() // a copy of its socket keeps the connection
	if err := request(conn, api.StreamRequest{Container: id, Exec: exec, Stream: stream}); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("open %s of container %s exec %q: %w", stream, id, exec, err)
	}
	return conn, nil
}

// request asks for a stream and reads the answer, byte by byte: what follows it is data.
func request(conn *net.UnixConn, what api.StreamRequest) error {
	line, err := json.Marshal(what)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	var answer []byte
	for b := make([]byte, 1); b[0] != '\n'; answer = append(answer, b[0]) {
		if _, err := conn.Read(b); err != nil {
			return fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
		}
	}
	var response api.StreamResponse
	if err := json.Unmarshal(answer, &response); err != nil {
		return err
	}
	if response.Error != "" {
		return fmt.Errorf("%w: %s", errdefs.ErrNotFound, response.Error)
	}
	return nil
}
