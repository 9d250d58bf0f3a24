package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/trace/otlp"
	"github.com/minicri/minicri/server"
	"github.com/minicri/minicri/stream"
)

// What the daemon waits for at its start and end, and between tries.
const (
	handover    = 2 * time.Second        // for an earlier daemon to end
	claimPause  = 5 * time.Millisecond   // between two looks whether it has
	firstProof  = 8 * time.Second        // for a proof that pods can be made, before it says ready
	lastAnswers = 250 * time.Millisecond // for calls that only look, when all others have ended
	lastSpans   = time.Second            // for a collector of traces
	lookPeriod  = time.Second            // between two looks at the files of the configuration
	minRetry    = time.Second            // before metrics that could not be served are tried again; it doubles
	maxRetry    = time.Minute
)

func serveCommand(cmd *cobra.Command, _ []string) error {
	if asked, _ := cmd.Flags().GetBool("version"); asked { // the flag exists
		return versionCommand(cmd, nil)
	}
	return serve(cmd.Context(), cmd.Flags())
}

// serve is the daemon. It restores the pods of an earlier one, and leaves its own pods running.
func serve(ctx context.Context, flags *pflag.FlagSet) (err error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGHUP) // neither may ever end the daemon
	defer signal.Ignore(syscall.SIGUSR1, syscall.SIGHUP)
	syscall.Umask(0o022) // whatever the shell had: containers of any user need the files
	read := stamp(flags) // first: later changes cause a reload
	l := config.Load(flags)
	defer func() {
		if err != nil {
			err = endError{err, l.LogFormat}
		}
	}()
	if err := errors.Join(l.Broken...); err != nil {
		return err
	}
	c := l.Config
	if os.Geteuid() != 0 {
		return errors.New("the daemon needs to be root: it makes namespaces, mounts and cgroups")
	}
	logger, level := newLogger(c)
	warnOfUnknown(l, logger)
	// First, so that a daemon that is refused leaves nothing.
	unlock, err := claim(ctx, c)
	if err != nil {
		return err
	}
	defer unlock()
	if err := process.Adopt(); err != nil {
		return err
	}
	d := &serving{flags: flags, read: read, config: c, level: level, logger: logger}
	return d.run(ctx, signals)
}

func warnOfUnknown(l *config.Loaded, logger *slog.Logger) {
	for _, key := range l.Unknown {
		logger.Warn("the configuration has a key without effect", "err", key)
	}
}

func (d *serving) run(ctx context.Context, signals <-chan os.Signal) (err error) {
	c, logger := d.config, d.logger
	debug.SetGCPercent(50) // the daemon allocates little, and takes its memory from the pods
	// Background work ends after the last call, not with the signal.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wait sync.WaitGroup
	defer wait.Wait()
	defer stop()
	node, err := wire(background, c, logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, node.close()) }()
	d.node = node
	node.runtime.Info.Config = func() any { return node.inForce.Load() }
	seen := &inspect.Node{
		Root: c.Root, State: c.State, Sandboxes: node.runtime.Sandboxes, Containers: node.runtime.Containers, Networks: node.runtime.Networks, Lives: node.lives,
		Measure: node.runtime.MeasurePods,
	}
	d.start(background, &wait, signals)
	// The inspection ends before what it shows is closed.
	inspecting, endInspection := context.WithCancel(background)
	var inspected sync.WaitGroup
	defer inspected.Wait()
	defer endInspection()
	if err := d.startInspection(inspecting, &inspected, seen); err != nil {
		return err
	}

	t := c.Tracing
	traces, err := otlp.Open(background, otlp.Options{Endpoint: t.Endpoint, HTTP: t.Protocol == "http", Insecure: t.Insecure, PerMillion: t.PerMillion, Version: version})
	if err != nil {
		return err
	}
	defer closeTraces(traces, logger)
	node.runtime.Sandboxes.AwaitProof(firstProof)
	listener, err := listen(c.Socket)
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	grpcServer := server.New(node.runtime, traces.Calls(), logger)
	d.serveContainerd(grpcServer)
	go func() { served <- grpcServer.Serve(listener) }()
	notify(logger, daemon.SdNotifyReady)
	go watchdog(background, seen, logger) // not waited for: a lock may never be had
	logger.Info("serving", "socket", c.Socket, "version", version, "pods", len(node.runtime.Sandboxes.List()))
	debug.FreeOSMemory() // of the start

	select {
	case err := <-served:
		return fmt.Errorf("serve %s: %w", c.Socket, err)
	case <-ctx.Done():
	}
	notify(logger, daemon.SdNotifyStopping)
	logger.Info("shutting down; pods keep running")
	shutdown(grpcServer, node.runtime, time.Duration(node.inForce.Load().Limits.Shutdown))
	return nil
}

func (d *serving) start(ctx context.Context, wait *sync.WaitGroup, signals <-chan os.Signal) {
	wait.Go(func() { process.ReapOrphans(ctx, d.node.runtime.Containers) })
	wait.Go(func() { d.node.runtime.Networks.Run(ctx) })
	wait.Go(func() {
		if err := d.node.streams.Serve(); err != nil {
			d.logger.Error("exec, attach and port-forward are not served", "err", err)
		}
	})
	wait.Go(func() { d.handleSignals(ctx, signals) })
}

// startInspection serves the debug socket and, if configured, the metrics until the context ends.
func (d *serving) startInspection(ctx context.Context, wait *sync.WaitGroup, node *inspect.Node) error {
	listener, err := listen(inspect.DebugSocket(d.config.State))
	if err != nil {
		return err
	}
	inspection := &inspect.Server{Node: node, Images: d.node.images, Logger: d.logger, Enter: d.node.runtime.Enter, Metrics: d.node.metrics.Handler()}
	wait.Go(func() {
		if err := inspection.Serve(ctx, socket.RootOnly(listener)); err != nil {
			d.logger.Error("the debug socket is not served: minicri timeline, pods, image and debug do not work", "err", err)
		}
	})
	if d.config.Metrics == "" {
		return nil
	}
	secure, err := stream.TLS{Cert: d.config.MetricsCert, Key: d.config.MetricsKey}.Config("")
	if err != nil {
		return fmt.Errorf("metrics_tls_cert, metrics_tls_key: %w", err)
	}
	wait.Go(func() {
		for pause := minRetry; ctx.Err() == nil; pause = min(2*pause, maxRetry) {
			if err := d.node.metrics.Serve(ctx, d.config.Metrics, secure, d.logger); err != nil {
				d.logger.Error("metrics are not served, which is tried again", "address", d.config.Metrics, "err", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
	})
	return nil
}

// shutdown ends the calls that the next daemon can repeat (object.Store.Waits), and lets the others finish within the
// limit. Then it cancels them, and what they were making is destroyed. The socket answers Status and List until then.
func shutdown(grpcServer *grpc.Server, runtime *server.Runtime, limit time.Duration) {
	runtime.Events.Close() // calls that listen never end by themselves
	runtime.Containers.Cancel()
	runtime.Networks.Leave() // a DEL may take longer than the shutdown
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	drained := runtime.Drain(ctx)
	// First: the next daemon takes over a DEL that still runs.
	runtime.Networks.Close()
	runtime.Sandboxes.Close()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		grpcServer.GracefulStop()
	}()
	if drained == nil {
		select {
		case <-finished:
			return
		case <-time.After(lastAnswers):
		}
	}
	grpcServer.Stop()
	<-finished
}

// serveContainerd serves the socket where the kubelet's cAdvisor looks for containerd, until the server stops. The
// path is another program's, so a failure is reported by Status and does not end the daemon.
func (d *serving) serveContainerd(grpcServer *grpc.Server) {
	path := d.config.Containerd
	if path == "" || path == d.config.Socket {
		return
	}
	const lost = "the kubelet's /metrics/cadvisor lacks the containers of minicri"
	info := &d.node.runtime.Info
	listener, err := socket.ListenReplaceable(path)
	if err != nil {
		problem := fmt.Sprintf("containerd_socket %s: %v: %s", path, err, lost)
		d.logger.Warn("containerd's socket is not served", "err", problem)
		info.ContainerdSocket = func() string { return problem }
		return
	}
	info.ContainerdSocket = func() string {
		if listener.Owned() {
			return ""
		}
		return fmt.Sprintf("containerd_socket %s: another runtime has taken it over: %s", path, lost)
	}
	go func() { // ends with the server
		if err := grpcServer.Serve(listener); err != nil {
			d.logger.Warn("containerd's socket is not served any more", "socket", path, "err", err)
		}
	}()
}

func closeTraces(traces *otlp.Exporter, logger *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), lastSpans)
	defer cancel()
	if err := traces.Close(ctx); err != nil {
		logger.Warn("some traces are lost", "err", err)
	}
}

// listen makes a socket for root alone, in place of a stale one.
func listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, err
	}
	if err := removeStale(path); err != nil {
		return nil, err
	}
	return socket.ListenPrivate(path)
}

func notify(logger *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		logger.Warn("systemd could not be notified", "state", state, "err", err)
	}
}

// handleSignals checks all attachments at SIGUSR1. It reloads the configuration at SIGHUP, and when a file
// of it has changed and then stayed the same for a period.
func (d *serving) handleSignals(ctx context.Context, signals <-chan os.Signal) {
	tick := time.NewTicker(lookPeriod)
	defer tick.Stop()
	last := d.read
	for {
		select {
		case <-ctx.Done():
			return
		case received := <-signals:
			if received == syscall.SIGUSR1 {
				d.node.runtime.Networks.RequestCheck()
				continue
			}
			d.reload()
		case <-tick.C:
			now := stamp(d.flags)
			if now != d.read && now == last {
				d.read = now
				d.reload()
			}
			last = now
		}
	}
}

type serving struct {
	flags  *pflag.FlagSet
	read   string // the stamp of config's files
	config *config.Config
	level  *slog.LevelVar
	logger *slog.Logger
	node   *parts // set before a reload can be asked for
}

func changedKeys(was, is reflect.Value, prefix string) (keys []string) {
	for i := range was.NumField() {
		field := was.Type().Field(i)
		key := prefix + field.Tag.Get("toml")
		switch {
		case !field.IsExported() || reflect.DeepEqual(was.Field(i).Interface(), is.Field(i).Interface()):
		case field.Type.Kind() == reflect.Struct:
			keys = append(keys, changedKeys(was.Field(i), is.Field(i), key+".")...)
		default:
			keys = append(keys, key)
		}
	}
	return keys
}

// watchdog pings systemd while the daemon is well (WatchdogSec=, systemd.service(5)).
func watchdog(ctx context.Context, node *inspect.Node, logger *slog.Logger) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		logger.Warn("systemd's watchdog is not served", "err", err)
	}
	if interval <= 0 {
		return
	}
	// One ping may come late, and the log says what is stuck before systemd ends the daemon.
	third := max(interval/3, time.Millisecond)
	inspect.Watch(ctx, node.Probes(), third, func() { notify(logger, daemon.SdNotifyWatchdog) }, logger)
}

var errInUse = errors.New("in use by another daemon")

// claim takes the socket and the directories for this daemon. unlock releases the directories.
func claim(ctx context.Context, c *config.Config) (unlock func(), err error) {
	// A process that a killed daemon was just starting holds its socket and locks until execve(2). A daemon that was
	// killed gets the same time to end; then a thread that the kernel keeps does not matter.
	ctx, cancel := context.WithTimeout(ctx, handover)
	defer cancel()
	for {
		late := ctx.Err() != nil
		if err = removeStale(c.Socket); err == nil {
			unlock, err = lockDirectories(c, late)
		}
		if !errors.Is(err, errInUse) || late {
			return unlock, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(claimPause):
		}
	}
}

// lockDirectories keeps a second daemon away (flock(2)), and removes what an earlier one had not finished.
func lockDirectories(c *config.Config, fromDoomed bool) (unlock func(), err error) {
	var locks []*os.File
	unlock = func() {
		for _, lock := range locks {
			_ = lock.Close()
		}
	}
	for _, directory := range []string{c.Root, c.State} {
		lock, err := lockDirectory(directory, fromDoomed)
		if err == nil {
			locks = append(locks, lock)
			err = state.ClearTemporary(directory)
		}
		if err != nil {
			unlock()
			return nil, err
		}
	}
	return unlock, nil
}

func lockDirectory(directory string, fromDoomed bool) (*os.File, error) {
	// Searchable by all: processes of user namespaces reach what is below.
	if err := os.MkdirAll(directory, 0o711); err != nil {
		return nil, err
	}
	guard, err := flock(directory, os.O_RDONLY) // nobody may lock a file that FreeLock is about to replace
	if err != nil {
		return nil, err
	}
	defer guard.Close()
	path := filepath.Join(directory, "lock")
	if fromDoomed {
		if err := state.FreeLock(path); err != nil {
			return nil, err
		}
	}
	return flock(path, os.O_CREATE|os.O_RDWR)
}

func flock(path string, flags int) (*os.File, error) {
	lock, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%s is %w: stop that one, or give this one --root and --state of its own", path, errInUse)
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// removeStale removes nothing but a socket that no process listens on.
func removeStale(path string) error {
	err := socket.CheckFree(path)
	switch {
	case errors.Is(err, socket.ErrInUse):
		return fmt.Errorf("%s is %w: stop that one, or give another --socket", path, errInUse)
	case errors.Is(err, socket.ErrNotSocket):
		return fmt.Errorf("%w: remove it, or give another --socket", err)
	case err != nil:
		return err
	}
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
