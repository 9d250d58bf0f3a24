package main

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/containerd/log"
	"k8s.io/klog/v2"

	"github.com/minicri/minicri/internal/config"
)

// newLogger logs to stderr, from the configured level on, which may be set anew.
func newLogger(c *config.Config) (*slog.Logger, *slog.LevelVar, error) {
	configured, err := c.Level()
	if err != nil {
		return nil, nil, err
	}
	level := &slog.LevelVar{}
	level.Set(configured)
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	// Libraries log to the default: one stream, one form.
	libraries := slog.New(libraryLog{logger.Handler()})
	slog.SetDefault(libraries)
	klog.SetSlogLogger(libraries)
	log.UseSlog()
	if err := log.SetLevel("error"); err != nil {
		return nil, nil, err
	}
	return logger, level, nil
}

// libraryLog is the log of libraries. Some of them log an error when a caller is
// gone, which is none of the node.
type libraryLog struct{ slog.Handler }

// lateAnswer is what ttrpc logs when the supervisor answers a call that was
// cancelled.
const lateAnswer = "ttrpc: received message on inactive stream"

// Handle implements slog.Handler.
func (l libraryLog) Handle(ctx context.Context, r slog.Record) error {
	if isCancelled(r) {
		if !l.Enabled(ctx, slog.LevelDebug) {
			return nil
		}
		r.Level = slog.LevelDebug
	}
	return l.Handler.Handle(ctx, r)
}

// isCancelled reports whether a record is about a call that was cancelled.
func isCancelled(r slog.Record) (yes bool) {
	yes = r.Message == lateAnswer
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok && errors.Is(err, context.Canceled) {
			yes = true
		}
		return !yes
	})
	return yes
}

// WithAttrs implements slog.Handler.
func (l libraryLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return libraryLog{l.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (l libraryLog) WithGroup(name string) slog.Handler {
	return libraryLog{l.Handler.WithGroup(name)}
}
