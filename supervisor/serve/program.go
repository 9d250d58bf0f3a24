package serve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
)

// listenToInit keeps what init says until its program runs. Behind the barrier
// it has no other way than its standard error, which is the container's.
func (c *container) listenToInit() {
	stream := api.Stderr
	if c.record.Terminal {
		stream = api.Stdout
	}
	streams := c.streams()
	if streams == nil || streams.Output(stream) == nil {
		return
	}
	c.initSays = streams.Output(stream)
	words := c.initSays.Attach()
	c.mu.Lock()
	c.initWords = words
	c.mu.Unlock()
}

// execPoll is how often awaitProgram looks whether init has become the program.
// The exec follows the barrier within 0.1 ms.
const execPoll = 20 * time.Microsecond

// awaitProgram returns when the container's program runs, or has run; with an
// error when init has ended instead.
func (c *container) awaitProgram(ctx context.Context) error {
	over := ctx.Done()
	for pause := execPoll; ; pause = min(2*pause, 10*time.Millisecond) {
		waits, err := beforeExec(c.snapshot().PID)
		if err != nil { // it has been waited for
			c.mu.Lock()
			waits = c.neverRan
			c.mu.Unlock()
		}
		if !waits {
			c.ignoreInit()
			return nil
		}
		select {
		case <-c.exited:
			if c.exit.StartError != "" {
				return fmt.Errorf("%s: %w", c.exit.StartError, errdefs.ErrFailedPrecondition)
			}
			return nil // it was killed
		case <-over:
			if !errors.Is(context.Cause(ctx), errKilled) {
				return fmt.Errorf("it is behind the exec barrier, and has not executed its program: %w", context.Cause(ctx))
			}
			over = nil // it ends: exited says how
		case <-time.After(pause):
		}
	}
}

func (c *container) ignoreInit() {
	if c.initWords == nil {
		return
	}
	c.initSays.Detach(c.initWords)
	c.mu.Lock()
	c.initWords = nil // with the megabytes that a loud program has filled it with
	c.mu.Unlock()
}

// noteProgram is called when init, our child, has ended and before it is
// reaped, and notes whether it has become the program: later it cannot be found out.
func (c *container) noteProgram(pid int) {
	c.countOOM() // before systemd removes the cgroup
	waits, err := beforeExec(pid)
	c.mu.Lock()
	c.neverRan = err == nil && waits
	c.mu.Unlock()
}

// triedToStart reports whether init was let through the barrier and has ended
// without becoming the program.
func (c *container) triedToStart() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.neverRan && c.record.StartedAt != 0
}

// startError is why a container that was started never ran its program. Its streams have
// ended.
func (c *container) startError() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	said := bytes.Buffer{}
	if c.initWords != nil {
		for chunk := range c.initWords {
			said.Write(chunk)
		}
	}
	if words := strings.TrimSpace(said.String()); words != "" {
		return words
	}
	return "init ended and did not execute the program"
}

// beforeExec reports whether a process has executed no program since its fork, also of
// one that has ended and is not reaped (PF_FORKNOEXEC, proc_pid_stat(5)). It is true of
// init until it becomes the program, also of one that was launched.
func beforeExec(pid int) (bool, error) {
	stat, err := process.ReadStat(pid)
	return err == nil && !stat.Executed, err
}
