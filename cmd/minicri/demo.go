package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/namespace"
)

// inside tells the demo that it runs in its own namespaces already.
const inside = "--inside"

// demo shows a pod's life on this machine. It runs in namespaces of its own
// (network, mounts, processes), so that the machine's network stays as it is
// and nothing can outlive it.
func demo(ctx context.Context, arguments []string, output io.Writer) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("the demo needs to be root: it makes namespaces")
	}
	switch {
	case len(arguments) == 1 && arguments[0] == inside:
		return demoInside(ctx, output)
	case len(arguments) == 2 && arguments[0] == demoServe:
		return serveDemo(ctx, arguments[1])
	case len(arguments) == 2 && arguments[0] == demoAsk:
		return askDemo(ctx, arguments[1], output)
	case len(arguments) > 0:
		return fmt.Errorf("minicri demo takes no arguments, it got %q", arguments)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, self, "demo", inside)
	command.Stdin, command.Stdout, command.Stderr = nil, output, os.Stderr
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGTERM) }
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		Pdeathsig:  unix.SIGKILL,
	}
	return command.Run()
}

func demoInside(ctx context.Context, output io.Writer) error {
	if err := prepareNamespaces(); err != nil {
		return err
	}
	d, err := newDemo(output)
	if err != nil {
		return err
	}
	defer d.close()
	// In here we are process 1, and adopt the pods of a daemon that was killed.
	reaping, stop := context.WithCancel(ctx)
	defer stop()
	go process.ReapOrphans(reaping)
	return d.run(ctx)
}

// prepareNamespaces makes the new namespaces fit to live in: mounts that stay
// in here, a /proc of our own processes, and loopback.
func prepareNamespaces() error {
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep our mounts to ourselves: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := namespace.LoopbackUp("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	return nil
}
