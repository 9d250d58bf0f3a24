package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// power starts a node: its process 1 in namespaces of its own, connected to the
// hub. Runtime and kubelet follow by themselves.
func (n *node) power() error {
	start, startIn, err := os.Pipe()
	if err != nil {
		return err
	}
	defer startIn.Close()
	command, err := n.cluster.background("nodes/"+n.Name+"/init.log", initRole, n.cluster.dir(), n.Name)
	if err != nil {
		return err
	}
	command.ExtraFiles = []*os.File{start}
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Setsid:     true,
	}
	err = command.Start()
	start.Close()
	if err != nil {
		return fmt.Errorf("start %s: %w", n.Name, err)
	}
	if n.Init, err = factsOf(command.Process.Pid); err != nil {
		return err
	}
	if err := n.cluster.save(); err != nil {
		return err
	}
	return n.connect()
}

// cut ends a node as a power cut does: its process 1 is killed, and with it the
// kernel kills all others of its process namespace.
func (n *node) cut() error {
	if err := kill(n.Init); err != nil {
		return fmt.Errorf("end %s: %w", n.Name, err)
	}
	return nil
}

const killTime = 30 * time.Second

// kill ends a process; one that has ended is no error.
func kill(facts process.Facts) error {
	if facts.PID == 0 {
		return nil
	}
	p, err := process.Open(facts)
	if errors.Is(err, process.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	return p.Kill(killTime)
}

// command is a command in all namespaces of the node.
func (n *node) command(ctx context.Context, arguments ...string) *exec.Cmd {
	enter := []string{"-t", strconv.Itoa(n.Init.PID), "-m", "-u", "-i", "-n", "-p", "-C", "--"}
	command := exec.CommandContext(ctx, "nsenter", append(enter, arguments...)...)
	command.Env = []string{nodePath, "HOME=/root", "KUBECONFIG=/etc/kubernetes/admin.conf", "TERM=" + os.Getenv("TERM")}
	return command
}

// run runs a command in the node and returns its output.
func (n *node) run(ctx context.Context, arguments ...string) (string, error) {
	return output(n.command(ctx, arguments...))
}

// output runs a command; what it said on its standard error is in the error.
func output(command *exec.Cmd) (string, error) {
	said := &bytes.Buffer{}
	command.Stderr = said
	out, err := command.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", strings.Join(command.Args, " "), err, bytes.TrimSpace(said.Bytes()))
	}
	return string(out), nil
}

// pid is the process of a service, in the node's process namespace; 0 if it does
// not run.
func (n *node) pid(service string) (int, error) {
	data, err := os.ReadFile(n.file(filepath.Join(serviceDir, service+".pid")))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(data))
}

// file is a file of the node as this process reaches it.
func (n *node) file(path string) string {
	return filepath.Join("/proc", strconv.Itoa(n.Init.PID), "root", path)
}

// endService ends a service with SIGTERM; process 1 starts it again.
func (n *node) endService(ctx context.Context, service string) error {
	pid, err := n.pid(service)
	if err != nil || pid == 0 {
		return err
	}
	if _, err := n.run(ctx, "kill", strconv.Itoa(pid)); err != nil {
		return err
	}
	return n.await(ctx, service+" has ended", func() (bool, error) {
		now, err := n.pid(service)
		return now != pid, err
	})
}

// stopService ends a service for good.
func (n *node) stopService(ctx context.Context, service string) error {
	if err := os.WriteFile(n.file(filepath.Join(serviceDir, service+".stop")), nil, 0o644); err != nil {
		return err
	}
	return n.endService(ctx, service)
}

const (
	awaitTime     = 3 * time.Minute
	awaitInterval = 100 * time.Millisecond
)

// await waits until something is so. It ends when the node does.
func (n *node) await(ctx context.Context, what string, is func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, awaitTime)
	defer cancel()
	for {
		so, err := is()
		if so && err == nil {
			return nil
		}
		if _, gone := process.ReadStat(n.Init.PID); gone != nil {
			return fmt.Errorf("wait until %s: %s has ended, see %s", what, n.Name, n.path("init.log"))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s on %s: %w (%v)", what, n.Name, ctx.Err(), err)
		case <-time.After(awaitInterval):
		}
	}
}
