package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"sync"
	"syscall"

	"github.com/minicri/minicri/internal/config"
)

// daemonSignals returns the signals that a running daemon acts on: SIGUSR1 and
// SIGHUP. From its first moment on neither ends it.
func daemonSignals() chan os.Signal {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGHUP)
	return signals
}

// handleSignals checks all attachments at SIGUSR1, and reloads the configuration
// at SIGHUP and when its file has changed, until the context ends.
func (d *serving) handleSignals(ctx context.Context, signals <-chan os.Signal) {
	changed := make(chan struct{})
	var wait sync.WaitGroup
	defer wait.Wait()
	wait.Go(func() { d.followFile(ctx, changed) })
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			d.reload()
		case received := <-signals:
			if received == syscall.SIGUSR1 {
				d.node.runtime.Networks.RequestCheck()
				continue
			}
			d.reload()
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
