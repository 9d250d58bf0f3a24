package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"strings"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/redact"
)

// newLogger logs to stderr, from the configured level on, which may be set anew.
func newLogger(c *config.Config) (*slog.Logger, *slog.LevelVar, error) {
	configured, err := c.Level()
	if err != nil {
		return nil, nil, err
	}
	level := &slog.LevelVar{}
	level.Set(configured)
	logger := slog.New(newHandler(os.Stderr, c.LogFormat, &slog.HandlerOptions{Level: level}, toJournal(os.Stderr)))
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

// newHandler writes to a file; the journal gets the priority of each line.
func newHandler(file io.Writer, format string, options *slog.HandlerOptions, journal bool) slog.Handler {
	if journal {
		file = prioritized{file}
	}
	if format == "json" {
		return slog.NewJSONHandler(file, options)
	}
	return slog.NewTextHandler(file, options)
}

// toJournal reports whether a file leads to journald (systemd.exec(5), JOURNAL_STREAM).
func toJournal(file *os.File) bool {
	var found unix.Stat_t
	err := unix.Fstat(int(file.Fd()), &found)
	return err == nil && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", found.Dev, found.Ino)
}

// endError is why a daemon ended, with the form of its log.
type endError struct {
	error
	form string
}

// Unwrap returns what happened.
func (e endError) Unwrap() error { return e.error }

// sayLast writes why the process ends. The journal gets the priority of an error, and a
// log of JSON ends with JSON.
func sayLast(to io.Writer, journal bool, err error) {
	text, priority := redact.Printable(errorText(err)), ""
	if end, is := errors.AsType[endError](err); is && end.form == "json" {
		slog.New(newHandler(to, end.form, nil, journal)).Error("minicri ends", "err", text)
		return
	}
	if journal {
		priority = "<3>"
		text = strings.ReplaceAll(text, "\n", "\n"+priority)
	}
	fmt.Fprintln(to, priority+"minicri:", text)
}

// prioritized adds priorities for journalctl -p (sd-daemon(3)) to lines of a handler of
// slog, which begin with the time and the level.
type prioritized struct{ io.Writer }

var levelOf = regexp.MustCompile(`^(?:time=\S+ level=|\{"time":"[^"]+","level":")(ERROR|WARN|INFO)`)

// Write implements io.Writer.
func (p prioritized) Write(line []byte) (int, error) {
	priority := "<7>"
	if found := levelOf.FindSubmatch(line); found != nil {
		priority = map[string]string{"ERROR": "<3>", "WARN": "<4>", "INFO": "<6>"}[string(found[1])]
	}
	if _, err := p.Writer.Write(append([]byte(priority), line...)); err != nil {
		return 0, err
	}
	return len(line), nil
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
