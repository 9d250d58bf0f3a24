package client

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minicri/minicri/supervisor/api"
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
	if timeout <= 0 || timeout > math.MaxInt64-execSlack {
		return c.execSync(ctx, id, process, 0, limit)
	}
	limited, cancel := context.WithTimeout(ctx, timeout+execSlack)
	defer cancel()
	result, err := c.execSync(limited, id, process, timeout, limit)
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

func (c *Client) execSync(ctx context.Context, id string, process *specs.Process, timeout time.Duration, limit uint64) (*Result, error) {
	began, exec := time.Now(), rand.Text()
	request, err := execRequest(id, exec, process, false)
	if err != nil {
		return nil, err
	}
	request.Timeout = int64(timeout)
	opened, call, done, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	if _, err := call.ExecStart(opened, request); err != nil {
		if ctx.Err() != nil {
			go c.ExecEnd(ctx, id, exec) // it may have been started; within endTime
		}
		return nil, native(err)
	}
	var timedOut atomic.Bool
	if timeout > 0 {
		late := time.AfterFunc(timeout-time.Since(began), func() {
			timedOut.Store(true)
			_ = c.ExecKill(ctx, id, exec, uint32(unix.SIGKILL), true) // it has ended, or ends with the connection
		})
		defer late.Stop()
	}
	output := &capture{room: limit}
	err = output.open(opened, c, id, exec)
	var answer *api.ExecWaitResponse
	if err == nil {
		answer, err = call.ExecWait(opened, &api.ExecWaitRequest{Id: id, ExecId: exec})
	}
	if err != nil {
		go func() { // within endTime
			c.ExecEnd(ctx, id, exec)
			output.close() // not before: what its reader leaves ends by itself, without what it has started
		}()
		return nil, native(err)
	}
	defer context.AfterFunc(opened, output.close)()
	output.work.Wait()
	result := output.Result
	result.Code, result.TimedOut = answer.GetCode(), timedOut.Load()
	return &result, nil
}

// capture reads the outputs of an exec: what is over the limit is read and dropped, so
// that the process does not wait.
type capture struct {
	Result
	conns []*net.UnixConn
	work  sync.WaitGroup
	mu    sync.Mutex // guards Result and room, until work is done
	room  uint64
}

func (k *capture) open(ctx context.Context, c *Client, id, exec string) error {
	for stream, into := range map[string]*[]byte{api.Stdout: &k.Stdout, api.Stderr: &k.Stderr} {
		conn, err := c.Stream(ctx, id, exec, stream)
		if err != nil {
			return err
		}
		k.conns = append(k.conns, conn)
		k.work.Go(func() { // ends with the stream, or at close
			k.read(conn, into)
			_ = conn.Close()
		})
	}
	return nil
}

func (k *capture) close() {
	for _, conn := range k.conns {
		_ = conn.Close()
	}
}

func (k *capture) read(from io.Reader, into *[]byte) {
	for buffer := make([]byte, 32<<10); ; {
		n, err := from.Read(buffer)
		k.mu.Lock()
		kept := min(uint64(n), k.room)
		k.room, k.Truncated = k.room-kept, k.Truncated || kept < uint64(n)
		*into = append(*into, buffer[:kept]...)
		k.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func execRequest(id, exec string, process *specs.Process, stdin bool) (*api.ExecStartRequest, error) {
	encoded, err := json.Marshal(process)
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", id, err)
	}
	return &api.ExecStartRequest{Id: id, ExecId: exec, Process: encoded, Stdin: stdin}, nil
}

// ExecStart starts a process, by an id that is unique in the container. Open
// its streams, then ExecWait: within 30 s, or it is ended.
func (c *Client) ExecStart(ctx context.Context, id, exec string, process *specs.Process, stdin bool) error {
	request, err := execRequest(id, exec, process, stdin)
	if err == nil {
		_, err = c.rpc.ExecStart(ctx, request)
	}
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
