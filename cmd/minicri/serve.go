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
	"google.golang.org/grpc"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/internal/trace/otlp"
	"github.com/minicri/minicri/server"
	"github.com/minicri/minicri/stream"
)

// serve is the daemon: it restores what an earlier one left, serves until the
// context ends, and leaves the pods running.
func serve(ctx context.Context, arguments []string) (err error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGHUP) // from the first moment on neither ends the daemon
	defer signal.Ignore(syscall.SIGUSR1, syscall.SIGHUP)    // until the very end
	// What is made for containers of any user must not depend on the shell that
	// the daemon was started from.
	syscall.Umask(0o022)
	read := stamp(arguments) // first: what changes from here on is followed
	l, err := loadForServing(arguments)
	if l != nil { // also of a configuration that is refused
		defer func() {
			if err != nil {
				err = endError{err, l.LogFormat}
			}
		}()
	}
	if err != nil {
		return err
	}
	c := l.Config
	if os.Geteuid() != 0 {
		return errors.New("the daemon needs to be root: it makes namespaces, mounts and cgroups")
	}
	logger, level, err := newLogger(c)
	if err != nil {
		return err
	}
	warnOfUnknown(l, logger)
	// Before anything is made, so that a daemon that is refused leaves nothing.
	unlock, err := claim(ctx, c)
	if err != nil {
		return err
	}
	defer unlock()
	if err := process.Adopt(); err != nil {
		return err
	}
	d := &serving{arguments: arguments, read: read, config: c, level: level, logger: logger}
	return d.run(ctx, signals)
}

// loadForServing reads the configuration of a daemon, which refuses what is broken.
func loadForServing(arguments []string) (*config.Loaded, error) {
	l, words, err := config.Read(arguments, os.Stdout, manual.DescribeDaemon)
	switch {
	case err != nil:
		return nil, usageError{err}
	case len(words) > 0:
		return nil, misused("%q is neither a command nor a flag of minicri: see minicri --help", words[0])
	}
	return l, errors.Join(l.Broken...)
}

func warnOfUnknown(l *config.Loaded, logger *slog.Logger) {
	for _, key := range l.Unknown {
		logger.Warn("the configuration has a key without effect", "err", key)
	}
}

// garbagePercent is half of the Go runtime's default: the daemon allocates
// little, and what it holds is taken from the node's pods. The runtime itself returns
// what a burst of calls has left, within some minutes.
const garbagePercent = 50

// firstProof is how long the start waits for what shows that pods can be made.
const firstProof = 8 * time.Second

func (d *serving) run(ctx context.Context, signals <-chan os.Signal) (err error) {
	c, logger := d.config, d.logger
	debug.SetGCPercent(garbagePercent)
	// What belongs to the daemon ends after the last call has: its context is
	// not that of the signal.
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
	// It ends before what it shows is closed.
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
	grpcServer := server.New(node.runtime, node.images, traces.Calls(), logger)
	go func() { served <- grpcServer.Serve(listener) }()
	notify(logger, daemon.SdNotifyReady)
	go watchdog(background, seen, logger) // not waited for: a lock may never be had
	logger.Info("serving", "socket", c.Socket, "version", version, "pods", len(node.runtime.Sandboxes.List()))
	debug.FreeOSMemory() // what only the start needed

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

// start starts the background work of the daemon, which ends with the context.
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

// startInspection serves what people and Prometheus look at, until the context
// ends: the debug socket and, if configured, the metrics.
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
		if err := d.node.metrics.Serve(ctx, d.config.Metrics, secure, d.logger); err != nil {
			d.logger.Error("metrics are not served", "address", d.config.Metrics, "err", err)
		}
	})
	return nil
}

// lastAnswers is how long calls that only look may take when all others have
// ended.
const lastAnswers = 250 * time.Millisecond

// shutdown lets the calls under way finish, for no longer than the limit; then
// it cancels them, and what they were making is destroyed. Until then the socket
// answers Status and List: the node is without a CRI only from the end of this
// daemon to the start of the next.
func shutdown(grpcServer *grpc.Server, runtime *server.Runtime, limit time.Duration) {
	runtime.Events.Close() // a call that listens has no end of its own
	runtime.Containers.Cancel()
	runtime.Networks.Leave() // a DEL may take longer than the shutdown
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	drained := runtime.Drain(ctx)
	// First: a DEL that still runs is left to the next daemon, not cut.
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

// lastSpans is how long the last spans may take, when the daemon ends.
const lastSpans = time.Second

func closeTraces(traces *otlp.Exporter, logger *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), lastSpans)
	defer cancel()
	if err := traces.Close(ctx); err != nil {
		logger.Warn("some traces are lost", "err", err)
	}
}

// listen makes the socket, for root alone from its first moment on. A socket
// that is there is of a daemon that has ended: the directories were locked.
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

// lookPeriod is how often the configuration is looked at for changes.
const lookPeriod = time.Second

// handleSignals checks all attachments at SIGUSR1, and reloads the configuration at SIGHUP
// and when one of its files has changed and was not written to for a period, until the
// context ends.
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
			now := stamp(d.arguments)
			if now != d.read && now == last {
				d.read = now
				d.reload()
			}
			last = now
		}
	}
}

// serving is what the daemon was started with.
type serving struct {
	arguments []string
	// read is the stamp of the files that config is from.
	read   string
	config *config.Config
	level  *slog.LevelVar
	logger *slog.Logger
	// node is set before anything can ask for a reload.
	node *parts
}

// changedKeys are the keys of the configuration that are different in two.
func changedKeys(was, is reflect.Value, prefix string) (keys []string) {
	for i := range was.NumField() {
		field := was.Type().Field(i)
		key := prefix + field.Tag.Get("toml")
		if !field.IsExported() || reflect.DeepEqual(was.Field(i).Interface(), is.Field(i).Interface()) {
			continue
		}
		if field.Type.Kind() == reflect.Struct {
			keys = append(keys, changedKeys(was.Field(i), is.Field(i), key+".")...)
			continue
		}
		keys = append(keys, key)
	}
	return keys
}

// watchdog pings systemd as long as the daemon is well (WatchdogSec= in
// systemd.service(5)), until the context ends. Without a watchdog it returns at once.
func watchdog(ctx context.Context, node *inspect.Node, logger *slog.Logger) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		logger.Warn("systemd's watchdog is not served", "err", err)
	}
	if interval <= 0 {
		return
	}
	// Every third of the interval, so that one ping may come late, and that after two
	// of them the log says what is stuck: systemd ends the daemon after the third.
	third := max(interval/3, time.Millisecond)
	inspect.Watch(ctx, node.Probes(), third, func() { notify(logger, daemon.SdNotifyWatchdog) }, logger)
}
