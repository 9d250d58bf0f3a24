package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// child is a process that the test started. A goroutine waits for it, so it
// never stays as a zombie.
type child struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
	err  error         // of its end, valid after done
}

// startChild starts a process on the calling thread, whose namespaces it gets.
// It writes to the end of the log file.
func startChild(cmd *exec.Cmd, log string) (*child, error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	cmd.Stdout, cmd.Stderr = file, file
	// A group of its own: Ctrl-C is for the test, which then takes down in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd: cmd, done: make(chan struct{})}
	go func() {
		c.err = cmd.Wait()
		close(c.done)
	}()
	return c, nil
}

func (c *child) pid() int { return c.cmd.Process.Pid }

func (c *child) running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// dump ends a process of Go that hangs, after it has written down its goroutines. One
// that does not even do that hangs in the kernel: the error says where.
func (c *child) dump() error {
	if err := c.cmd.Process.Signal(syscall.SIGQUIT); err == nil {
		select {
		case <-c.done:
			return nil
		case <-time.After(settleTime):
		}
	}
	return errors.Join(fmt.Errorf("its threads are in the kernel at%s", kernelStacks(c.pid())), c.kill())
}

// kernelStacks are the stacks of a process's threads in the kernel, as
// proc_pid_stack(5) has them.
func kernelStacks(pid int) string {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stack", pid)) // a good pattern
	var all strings.Builder
	for _, file := range files {
		stack, err := os.ReadFile(file)
		if err != nil {
			stack = []byte(err.Error())
		}
		fmt.Fprintf(&all, "\n%s:\n%s", file, stack)
	}
	return all.String()
}

// kill ends the process with SIGKILL, unless it has ended.
func (c *child) kill() error {
	err := c.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-c.done
	return err
}

// terminate ends the process with SIGTERM. It has to exit with code 0 before
// ctx ends.
func (c *child) terminate(ctx context.Context) error {
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		<-c.done // the only reason why it cannot be told
		return fmt.Errorf("it ended before SIGTERM: %w", errors.Join(err, c.err))
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		return errors.Join(errors.New("still runs after SIGTERM, its log ends with its goroutines"), c.dump())
	}
	if c.err != nil {
		return fmt.Errorf("want exit code 0 after SIGTERM: %w", c.err)
	}
	return nil
}
