package runtime

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/system"

	"github.com/minicri/minicri/internal/cgroup"
)

// Pause starts one pod's pause process and stays no longer than that takes.
// The caller hears one JSON line per step on stdout and gives the word to go on
// by "start\n" on stdin:
//
//	-> {"pid":N,"start_time":N}   init waits at the exec barrier
//	<- start                      anything else, or the end of stdin: take it back
//	-> {"started":true}           pause runs
//	-> {"error":"STEP: ..."}      instead of either; nothing is left
type Pause struct {
	Root          string // directory of container states
	ID            string // unique below Root
	Bundle        string // directory with config.json; relative paths in it start here
	SystemdCgroup bool   // cgroupsPath is slice:prefix:name, made by systemd
}

// pauseReport is a line on stdout.
type pauseReport struct {
	PID       int    `json:"pid,omitempty"`
	StartTime uint64 `json:"start_time,omitempty"` // clock ticks since boot: field 22 of proc_pid_stat(5)
	Started   bool   `json:"started,omitempty"`
	Error     string `json:"error,omitempty"`
}

// Run makes the container, waits for the word and starts pause. A cancelled
// context is the same as a refusal. It returns the exit code of the command.
func (p Pause) Run(ctx context.Context, stdin io.Reader, stdout io.Writer) int {
	if err := p.run(ctx, stdin, stdout); err != nil {
		_ = report(stdout, pauseReport{Error: err.Error()})
		return 1
	}
	return 0
}

func (p Pause) run(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	go cgroup.WarmLock() // ends by itself, at the latest with the process
	container, process, err := p.create()
	if err != nil {
		return err
	}
	if err := p.prepare(container, process, stdout); err != nil {
		return errors.Join(err, destroy(container, process))
	}
	if err := awaitWord(ctx, stdin); err != nil {
		return errors.Join(fmt.Errorf("wait for the word: %w", err), destroy(container, process))
	}
	if err := release(container, process); err != nil {
		return errors.Join(fmt.Errorf("start: %w", err), destroy(container, process))
	}
	return report(stdout, pauseReport{Started: true})
}

func (p Pause) create() (*libcontainer.Container, *libcontainer.Process, error) {
	spec, err := ReadSpec(p.Bundle)
	if err != nil {
		return nil, nil, fmt.Errorf("spec: %w", err)
	}
	// libcontainer asks for the working directory and must get one.
	if err := os.Chdir("/"); err != nil {
		return nil, nil, fmt.Errorf("spec: %w", err)
	}
	config, err := toConfig(spec, p.ID, p.SystemdCgroup, !canJoinSessionKeyring())
	if err != nil {
		return nil, nil, fmt.Errorf("spec: %w", err)
	}
	process, err := newProcess(spec.Process)
	if err != nil {
		return nil, nil, fmt.Errorf("spec: %w", err)
	}
	process.Init = true
	container, err := libcontainer.Create(p.Root, p.ID, config)
	if err != nil {
		return nil, nil, fmt.Errorf("create: container %s: %w", p.ID, err)
	}
	return container, process, nil
}

// prepare brings init to the exec barrier and says so.
func (p Pause) prepare(container *libcontainer.Container, process *libcontainer.Process, stdout io.Writer) error {
	if err := container.Start(process); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	pid, err := process.Pid()
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	stat, err := system.Stat(pid)
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	return report(stdout, pauseReport{PID: pid, StartTime: stat.StartTime})
}

// awaitWord returns nil when stdin says "start\n".
func awaitWord(ctx context.Context, stdin io.Reader) error {
	word := make(chan string, 1)
	go func() {
		// The reader ends with the process at the latest, and holds nothing.
		line, _ := bufio.NewReader(stdin).ReadString('\n')
		word <- line
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case line := <-word:
		if line != "start\n" {
			return fmt.Errorf("got %q instead, taking the container back", line)
		}
		return nil
	}
}

func report(stdout io.Writer, r pauseReport) error {
	if err := json.NewEncoder(stdout).Encode(r); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}
