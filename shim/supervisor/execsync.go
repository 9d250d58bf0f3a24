package supervisor

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/minicri/minicri/shim/api"
)

// capture sends a process's output, up to a cap of both streams together.
type capture struct {
	ctx  context.Context // of the client's connection
	send func(*api.ExecSyncResponse) error
	cap  uint64

	mu        sync.Mutex
	gone      bool // the client
	sent      uint64
	truncated bool
}

func (k *capture) stdout(p []byte) { k.pass(api.Stdout, p) }
func (k *capture) stderr(p []byte) { k.pass(api.Stderr, p) }

// pass drops what is over the cap, or unread: the process must not block on
// it.
func (k *capture) pass(stream string, p []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	room := k.cap - k.sent
	if uint64(len(p)) > room {
		p, k.truncated = p[:room], true
	}
	k.sent += uint64(len(p))
	k.gone = k.gone || k.ctx.Err() != nil
	if len(p) == 0 || k.gone {
		return
	}
	message := &api.ExecSyncResponse{Stdout: p}
	if stream == api.Stderr {
		message = &api.ExecSyncResponse{Stderr: p}
	}
	k.gone = k.send(message) != nil
}

// execSync runs a process to its end, its time-out or the client's going away;
// the latter two end its whole tree.
func (c *container) execSync(ctx context.Context, request *api.ExecSyncRequest, send func(*api.ExecSyncResponse) error) error {
	timeout, began := time.Duration(request.Timeout), time.Now()
	starting, over := ctx, func() {}
	if timeout > 0 {
		starting, over = context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not done within %v: %w", timeout, context.DeadlineExceeded))
	}
	e, err := c.startExec(starting, request.Process, false)
	over()
	if err != nil {
		return err
	}
	if timeout > 0 {
		timeout = max(1, timeout-time.Since(began))
	}
	defer e.release()
	k := &capture{ctx: ctx, send: send, cap: request.OutputCap}
	for stream, emit := range map[string]func([]byte){api.Stdout: k.stdout, api.Stderr: k.stderr} {
		pump, err := e.pipes.Take(stream, emit)
		if err != nil {
			return err
		}
		go pump.Run() // ends with release
	}
	timedOut, err := e.awaitOrKill(ctx, timeout)
	if err != nil {
		return err
	}
	e.pipes.AwaitOutput()
	k.mu.Lock()
	defer k.mu.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return send(&api.ExecSyncResponse{Exit: &api.ExecExit{Code: e.code, TimedOut: timedOut, Truncated: k.truncated}})
}

// killTimeout is how long a killed process may take to be gone, in D state
// for example.
const killTimeout = 3 * time.Second

// awaitOrKill waits for the end of the process, and brings it about when ctx
// or the time-out (none if 0) ends first.
func (e *exec) awaitOrKill(ctx context.Context, timeout time.Duration) (timedOut bool, err error) {
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-e.exited:
		return false, nil
	case <-ctx.Done():
	case <-expired:
		timedOut = true
	}
	if err := e.process.KillTree(); err != nil {
		return timedOut, err
	}
	select {
	case <-e.exited:
		return timedOut, nil
	case <-time.After(killTimeout): // D state: it ends when it can, and is reaped then
		return timedOut, context.DeadlineExceeded
	}
}
