package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// child is a process of the benchmark. It is ended by its pid alone.
type child struct {
	command *exec.Cmd
	output  *bytes.Buffer
}

func startSelf(ctx context.Context, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return start(ctx, self, args...)
}

func start(ctx context.Context, program string, args ...string) (*child, error) {
	c := &child{command: exec.CommandContext(ctx, program, args...), output: &bytes.Buffer{}}
	c.command.Stdout, c.command.Stderr = c.output, c.output
	c.command.Cancel = func() error { return c.command.Process.Signal(os.Interrupt) }
	c.command.WaitDelay = 10 * time.Second
	if err := c.command.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	return c, nil
}

func (c *child) stop() {
	_ = c.command.Process.Signal(os.Interrupt)
	done := time.AfterFunc(10*time.Second, func() { _ = c.command.Process.Kill() })
	_ = c.command.Wait()
	done.Stop()
}

// cost is what a process has used since it started.
type cost struct {
	cpu  time.Duration // user and system, with children that it waited for
	peak int64         // bytes of resident memory
}

func (c *child) cost() (cost, error) {
	dir := filepath.Join("/proc", strconv.Itoa(c.command.Process.Pid))
	cpu, err := cpuTime(filepath.Join(dir, "stat"))
	if err != nil {
		return cost{}, err
	}
	peak, err := peakMemory(filepath.Join(dir, "status"))
	return cost{cpu: cpu, peak: peak}, err
}

// tick is the unit of times in /proc/PID/stat on Linux, USER_HZ of 100.
const tick = 10 * time.Millisecond

// cpuTime adds up utime, stime, cutime and cstime: proc_pid_stat(5), fields 14
// to 17, of which 12 follow the name in brackets.
func cpuTime(path string) (sum time.Duration, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	for _, field := range fields[11:15] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * tick
	}
	return sum, nil
}

func peakMemory(path string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(string(data), "VmHWM:")
	if !ok {
		return 0, errors.New("no VmHWM in " + path)
	}
	kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	return kib << 10, err
}

func writeWhole(path, text string) error {
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func waitForFile(ctx context.Context, path string) (string, error) {
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
