package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/supervisor/api"
)

// StartOptions says how to start a supervisor.
type StartOptions struct {
	Binary        string // path of minicri-shim
	Build         string // what names it: Program.Build
	Version       string // of this daemon
	ForOthers     string // where a supervisor finds the program for its starters: Program.ForOthers
	Dir           string // the directory of the supervisor, made if absent
	SystemdCgroup bool   // cgroupsPath of its containers is slice:prefix:name
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
// fails.
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
	default:
		return fmt.Errorf("%s: %w", said, errdefs.ErrUnavailable)
	}
}

// endingInterval is between two looks at a supervisor that is about to end: it
// holds its directory's lock and does not answer.
const endingInterval = 20 * time.Millisecond

// serving connects to a group's supervisor, or starts it; mu is held.
func (s *Set) serving(ctx context.Context, g *group) (*Client, error) {
	for began := time.Now(); ; time.Sleep(endingInterval) {
		supervisor, err := g.connect(ctx, s)
		if !errdefs.IsUnavailable(err) || ctx.Err() != nil {
			return supervisor, err
		}
		holder, err := api.LockHolder(g.dir)
		if err == nil && holder != 0 && time.Since(began) < holderGrace {
			continue
		}
		if err := g.failed.wait(); err != nil {
			return nil, err
		}
		if err == nil && holder != 0 {
			err = endHolder(g.dir)
		}
		if err == nil {
			err = s.Known(filepath.Base(g.dir))
		}
		if err == nil {
			supervisor, err = s.start(ctx, g)
		}
		if err == nil {
			g.failed = backOff{}
			return g.use(supervisor), nil
		}
		if next := g.failed.note(err); s.options.Logger != nil {
			s.options.Logger.Error("a supervisor does not start: it is tried again", "dir", g.dir, "after", next, "err", err)
		}
		return nil, err
	}
}

func (s *Set) start(ctx context.Context, g *group) (*Client, error) {
	options := s.options.Start
	options.Dir, options.answer = g.dir, &s.answer
	started, err := Start(ctx, options)
	if err != nil {
		return nil, err
	}
	if err := started.greet(ctx, s.options); err != nil {
		return nil, errors.Join(err, started.Close())
	}
	return started, nil
}

// backOff keeps a start that has failed from being tried again at once.
type backOff struct {
	err   error // why it failed
	pause time.Duration
	until time.Time
}

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 5 * time.Second
)

// note is for a start that has failed, and returns when there may be the next.
func (b *backOff) note(err error) time.Duration {
	b.pause = min(max(2*b.pause, firstPause), longestPause)
	b.err, b.until = err, time.Now().Add(b.pause)
	return b.pause
}

// wait says why there is no start now, nil if there may be one.
func (b *backOff) wait() error {
	if left := time.Until(b.until); left > 0 {
		return fmt.Errorf("the supervisor is started again in %v, its last start failed: %w: %w", left.Round(time.Millisecond), errdefs.ErrUnavailable, b.err)
	}
	return nil
}

// A directory that is locked and does not answer has a supervisor that is about to end,
// or one that no connection reaches. The former is waited for.
const holderGrace = 2 * time.Second

// holderKill is how long a supervisor may take to end after SIGKILL.
const holderKill = 5 * time.Second

// endHolder ends the supervisor that has the lock of a directory and does not answer.
// The error names a process that is no supervisor of ours.
func endHolder(dir string) error {
	pid, err := api.LockHolder(dir)
	if err != nil || pid == 0 {
		return err
	}
	holder, err := process.Find(pid)
	if errors.Is(err, process.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer holder.Close()
	if again, err := api.LockHolder(dir); err != nil || again != pid {
		return err // the pid may have been given to another process before it was opened
	}
	if line := commandLine(pid); !serves(line, dir) {
		return fmt.Errorf("%s/%s is locked by process %d (%s), which is no supervisor: end that process: %w", dir, api.LockFile, pid, strings.Join(line, " "), errdefs.ErrUnavailable)
	}
	if err := holder.Kill(holderKill); err != nil {
		return fmt.Errorf("end the supervisor that has %s locked and does not answer: %w: %w", dir, errdefs.ErrUnavailable, err)
	}
	return nil
}

// serves reports whether a command line is that of the supervisor of a directory.
func serves(line []string, dir string) bool {
	return len(line) > 1 && line[0] == Name && line[1] == "serve" && slices.Contains(line, dir)
}

func commandLine(pid int) []string {
	content, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // "" if it has ended
	return strings.Split(strings.TrimSuffix(string(content), "\x00"), "\x00")
}
