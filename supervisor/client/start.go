package client

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/supervisor/api"
)

// StartOptions says how to start a supervisor.
type StartOptions struct {
	Binary        string   // path of minicri-shim
	Build         string   // what names it: Program.Build
	Version       string   // of this daemon
	ForOthers     string   // where a supervisor finds the program for its starters: Program.ForOthers
	Dir           string   // the directory of the supervisor, made if absent
	SystemdCgroup bool     // cgroupsPath of its containers is slice:prefix:name
	Cgroups       []string // cgroup directories that the supervisor moves into; none: the daemon's own
	// answer is how long a call may take before a supervisor that answers
	// nothing is killed; nil: no limit.
	answer *atomic.Int64
}

// longestSocket: sockaddr_un (unix(7)) holds 107 characters and a NUL.
const longestSocket = 107

// startTimeout is how long a supervisor may take to serve.
const startTimeout = 10 * time.Second

// Start starts a supervisor in a session of its own, which outlives the daemon, and
// connects to it. Its log is the file Log of DIR. While another process has DIR locked, Start
// fails with errdefs.ErrAlreadyExists.
func Start(ctx context.Context, options StartOptions) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if socket := filepath.Join(options.Dir, api.StreamSocket); len(socket) > longestSocket {
		return nil, fmt.Errorf("start the supervisor: %s is longer than the %d characters that a unix socket can have, choose a shorter directory: %w", socket, longestSocket, errdefs.ErrInvalidArgument)
	}
	if err := os.MkdirAll(options.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("start the supervisor: %w", err)
	}
	if err := spawn(ctx, options); err != nil {
		return nil, fmt.Errorf("start the supervisor of %s (its log is shim.log there): %w", options.Dir, err)
	}
	return connect(ctx, options.Dir, options.answer)
}

// spawn returns when the supervisor serves.
func spawn(ctx context.Context, options StartOptions) error {
	log, err := os.OpenFile(filepath.Join(options.Dir, Log), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	ready, inShim, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd := exec.Command(options.Binary, arguments(options)...)
	cmd.Args[0] = Name
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{inShim}
	cmd.Dir = "/"
	// One processor is enough for a supervisor and saves 0.3 MiB; libcontainer hands
	// it on to its inits, which start faster with it.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "GOMAXPROCS=1"}, failpoint.Environ()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = inShim.Close()
	if err != nil {
		return err
	}
	if err := awaitReady(ctx, ready, cmd.Process); err != nil {
		go func() { _ = cmd.Wait() }() // it ends, or is killed
		return err
	}
	// It outlives us, or is reaped as an orphan is: what is held for a child that
	// is waited for would be a descriptor more than for one that was found.
	return cmd.Process.Release()
}

func arguments(options StartOptions) []string {
	args := []string{"serve", "--dir", options.Dir, "--build", options.Build, "--daemon-version", options.Version, "--ready-fd", "3"}
	if options.SystemdCgroup {
		args = append(args, "--systemd-cgroup")
	}
	for _, cgroup := range options.Cgroups {
		args = append(args, "--cgroup", cgroup)
	}
	return args
}

// awaitReady reads what the supervisor says; one that ends says nothing.
func awaitReady(ctx context.Context, ready *os.File, shim *os.Process) error {
	stop := context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Now()) })
	defer stop()
	word, err := io.ReadAll(ready)
	if err != nil {
		_ = shim.Kill()
		return fmt.Errorf("it does not serve: %w", errdefs.ErrUnavailable)
	}
	switch said := string(word); {
	case said == api.Ready:
		return nil
	case said == "":
		return fmt.Errorf("it ended and did not say why: %w", errdefs.ErrUnavailable)
	case strings.Contains(said, api.ErrLocked.Error()):
		return fmt.Errorf("%s: %w", said, errdefs.ErrAlreadyExists)
	default:
		return fmt.Errorf("%s: %w", said, errdefs.ErrUnavailable)
	}
}
