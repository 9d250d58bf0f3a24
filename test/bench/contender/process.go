package contender

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"
)

// Process is a child of the benchmark. It is ended by its pid alone.
type Process struct {
	PID     int
	Output  *bytes.Buffer // both outputs; to be read when it has ended
	command *exec.Cmd
}

// StartSelf starts the benchmark's own program once more.
func StartSelf(ctx context.Context, args ...string) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return start(ctx, self, args...)
}

func start(ctx context.Context, program string, args ...string) (*Process, error) {
	p := &Process{command: exec.CommandContext(ctx, program, args...), Output: &bytes.Buffer{}}
	p.command.Stdout, p.command.Stderr = p.Output, p.Output
	p.command.Cancel = func() error { return p.command.Process.Signal(os.Interrupt) }
	p.command.WaitDelay = 10 * time.Second
	if err := p.command.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	p.PID = p.command.Process.Pid
	return p, nil
}

// Stop interrupts the process and waits for its end, which it forces after ten
// seconds.
func (p *Process) Stop() {
	_ = p.command.Process.Signal(os.Interrupt)
	done := time.AfterFunc(10*time.Second, func() { _ = p.command.Process.Kill() })
	_ = p.command.Wait()
	done.Stop()
}

// WriteWhole writes a file that readers see whole or not at all.
func WriteWhole(path, text string) error {
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// WaitForFile returns what is in a file as soon as there is one.
func WaitForFile(ctx context.Context, path string) (string, error) {
	for {
		data, err := os.ReadFile(path)
		if err == nil {
			return string(data), nil
		}
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			return "", fmt.Errorf("wait for %s: %w", path, err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
