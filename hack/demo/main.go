// Command demo shows a pod's life with minicri on this machine: pods and
// containers run, one crashes, the daemon is killed and restarted, everything
// is removed, and the leftovers are counted. It runs the minicri of its own
// directory in new namespaces (network, mounts, processes): the network of the
// machine does not change, and no process outlives it.
//
// The same program is the only file of the image that the demo's containers
// run, with the arguments --serve and --ask.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/namespace"
)

// The roles of this program, by its first argument; without one it is the demo.
const (
	insideRole = "--inside" // the demo, in its namespaces
	serveRole  = "--serve"  // ADDRESS: answer requests, crash when told to
	askRole    = "--ask"    // URL: print the answer
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string, output io.Writer) error {
	switch {
	case len(arguments) == 0:
		return demo(ctx, output)
	case len(arguments) == 1 && arguments[0] == insideRole:
		return demoInside(ctx, output)
	case len(arguments) == 2 && arguments[0] == serveRole:
		return serve(ctx, arguments[1])
	case len(arguments) == 2 && arguments[0] == askRole:
		return ask(ctx, arguments[1], output)
	default:
		return fmt.Errorf("the demo takes no arguments, it got %q", arguments)
	}
}

// demo runs this program again in namespaces of its own and waits for it.
func demo(ctx context.Context, output io.Writer) error {
	if os.Geteuid() != 0 {
		return errors.New("run it as root: it makes namespaces")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, self, insideRole)
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
	d, err := newDemonstration(output)
	if err != nil {
		return err
	}
	defer d.close()
	// Process 1 of this namespace inherits the pods of a daemon that was killed.
	reaping, stop := context.WithCancel(ctx)
	defer stop()
	go process.ReapOrphans(reaping, nil)
	return d.run(ctx)
}

// prepareNamespaces keeps mounts inside, mounts a /proc of the new process
// namespace, and brings loopback up.
func prepareNamespaces() error {
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mounts slaves of the machine's: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return namespace.LoopbackUp("/proc/thread-self/ns/net")
}
