package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"slices"
	"syscall"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/network"
)

// orders are the signals that ask a running daemon for something. From its first
// moment on none of them ends it, whatever the shell or the unit that sends them
// means by it.
func orders() (asked chan os.Signal) {
	asked = make(chan os.Signal, 8)
	signal.Notify(asked, syscall.SIGUSR1, syscall.SIGHUP)
	return asked
}

// obey has all attachments checked at SIGUSR1, and reads the configuration again
// at SIGHUP, until the context ends.
func (d *serving) obey(ctx context.Context, asked <-chan os.Signal, networks *network.CNI) {
	for {
		select {
		case <-ctx.Done():
			return
		case order := <-asked:
			if order == syscall.SIGUSR1 {
				networks.RequestCheck()
				continue
			}
			d.reload()
		}
	}
}

// serving is what the daemon was started with.
type serving struct {
	arguments []string
	config    *config.Config
	level     *slog.LevelVar
	logger    *slog.Logger
}

// reloaded are the keys that take effect without a restart.
var reloaded = []string{"log_level"}

// reload reads the configuration and puts into force what can be: the log level.
// CNI's configuration is read whenever it changes, without being asked.
func (d *serving) reload() {
	fresh, err := config.Load(d.arguments, os.Stderr)
	if err != nil {
		d.logger.Error("the configuration cannot be reloaded: it stays as it was", "err", err)
		return
	}
	level, err := fresh.Level()
	if err != nil {
		d.logger.Error("the configuration cannot be reloaded: it stays as it was", "err", err)
		return
	}
	d.level.Set(level)
	changed := changedKeys(reflect.ValueOf(d.config).Elem(), reflect.ValueOf(fresh).Elem(), "")
	restart := slices.DeleteFunc(changed, func(key string) bool { return slices.Contains(reloaded, key) })
	if len(restart) > 0 {
		d.logger.Warn("configuration reloaded; these keys have changed and need a restart of the daemon", "keys", restart, "log_level", level)
		return
	}
	d.logger.Info("configuration reloaded", "log_level", level)
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
