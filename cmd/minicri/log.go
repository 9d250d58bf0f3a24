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

// libraryLog is the log of libraries. That a caller has gone is an error to
// some of them and none to the node.
type libraryLog struct{ slog.Handler }

// lateAnswer is what ttrpc says of the shim's answer to a call that was given
// up.
const lateAnswer = "ttrpc: received message on inactive stream"

// Handle implements slog.Handler.
func (l libraryLog) Handle(ctx context.Context, r slog.Record) error {
	if givenUp(r) {
		if !l.Enabled(ctx, slog.LevelDebug) {
			return nil
		}
		r.Level = slog.LevelDebug
	}
	return l.Handler.Handle(ctx, r)
}

// givenUp tells that a record is about a call whose caller has gone.
func givenUp(r slog.Record) (yes bool) {
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
