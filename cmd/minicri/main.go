// Command minicri is a Kubernetes container runtime: it serves the CRI on a
// unix socket. Without a command it is the daemon, in the foreground.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/containerd/log"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/redact"
)

// version is set by the linker (hack/version).
var version = "0.1.0-dev"

func main() {
	if image.IsZstdDecoder() {
		os.Exit(image.DecodeZstd())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := command(ctx, os.Args[1:], os.Stdout)
	stop()
	if err == nil {
		return
	}
	sayLast(os.Stderr, toJournal(os.Stderr), err)
	if _, misused := errors.AsType[manual.Misuse](err); misused {
		os.Exit(2)
	}
	os.Exit(1)
}

// command runs the command that the arguments name, or the daemon.
func command(ctx context.Context, arguments []string, output io.Writer) error {
	p := program()
	p.SetArgs(arguments)
	p.SetOut(output)
	return p.ExecuteContext(ctx)
}

// program returns the commands with their actions.
func program() *cobra.Command {
	return manual.Program(map[string]manual.Action{
		"":                       serveCommand,
		"check":                  checkCommand,
		"config check":           configCheckCommand,
		"config default":         configDefaultCommand,
		"config from-containerd": configConvertCommand,
		"config show":            configShowCommand,
		"debug bundle":           bundleCommand,
		"image import":           importCommand,
		"image inspect":          imageInspectCommand,
		"image ls":               imageListCommand,
		"image pull":             pullCommand,
		"image rm":               imageRemoveCommand,
		"image save":             saveCommand,
		"image tag":              tagCommand,
		"image untag":            untagCommand,
		"inspect":                inspectCommand,
		"pods":                   podsCommand,
		"status":                 statusCommand,
		"timeline":               timelineCommand,
		"version":                versionCommand,
		"crictl":                 crictlCommand,
	}, namesOf)
}

func versionCommand(cmd *cobra.Command, _ []string) error {
	_, err := fmt.Fprintln(cmd.OutOrStdout(), "minicri", version)
	return err
}

// newLogger logs to stderr, from the configured level on. Its level can be changed.
func newLogger(c *config.Config) (*slog.Logger, *slog.LevelVar) {
	level := &slog.LevelVar{}
	configured, _ := c.Level() // Read has checked it
	level.Set(configured)
	logger := slog.New(newHandler(os.Stderr, c.LogFormat, level, toJournal(os.Stderr)))
	libraries := slog.New(libraryLog{logger.Handler()})
	slog.SetDefault(libraries)
	klog.SetSlogLogger(libraries)
	log.UseSlog()
	_ = log.SetLevel("error") // there is such a level
	return logger, level
}

func newHandler(file io.Writer, format string, level slog.Leveler, journal bool) slog.Handler {
	if journal {
		file = prioritized{file}
	}
	if format == "json" {
		return slog.NewJSONHandler(file, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Value.Kind() == slog.KindDuration { // with its unit, as in a text
				a.Value = slog.StringValue(a.Value.Duration().String())
			}
			return a
		}})
	}
	return slog.NewTextHandler(file, &slog.HandlerOptions{Level: level})
}

// toJournal reports whether a file leads to journald (JOURNAL_STREAM, systemd.exec(5)).
func toJournal(file *os.File) bool {
	var found unix.Stat_t
	err := unix.Fstat(int(file.Fd()), &found)
	return err == nil && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", found.Dev, found.Ino)
}

// endError is why a daemon ended, with the format of its log.
type endError struct {
	error
	form string
}

func (e endError) Unwrap() error { return e.error }

// sayLast writes why the process ends, to a daemon's log in one line and in the log's format.
func sayLast(to io.Writer, journal bool, err error) {
	separator, priority := "; ", ""
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		separator = "\n  "
	}
	text := redact.Printable(strings.ReplaceAll(err.Error(), "\n", separator))
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

// prioritized adds priorities for journalctl -p (sd-daemon(3)) to lines from slog.
type prioritized struct{ io.Writer }

var levelOf = regexp.MustCompile(`^(?:time=\S+ level=|\{"time":"[^"]+","level":")(ERROR|WARN|INFO)`)

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

// libraryLog logs errors of cancelled calls as debug messages: the caller is gone, the node is well.
type libraryLog struct{ slog.Handler }

// lateAnswer is what ttrpc logs when the supervisor answers a cancelled call.
const lateAnswer = "ttrpc: received message on inactive stream"

func (l libraryLog) Handle(ctx context.Context, r slog.Record) error {
	cancelled := r.Message == lateAnswer
	r.Attrs(func(a slog.Attr) bool {
		err, is := a.Value.Any().(error)
		cancelled = cancelled || is && errors.Is(err, context.Canceled)
		return !cancelled
	})
	if cancelled {
		if !l.Enabled(ctx, slog.LevelDebug) {
			return nil
		}
		r.Level = slog.LevelDebug
	}
	return l.Handler.Handle(ctx, r)
}

func (l libraryLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return libraryLog{l.Handler.WithAttrs(attrs)}
}

func (l libraryLog) WithGroup(name string) slog.Handler { return libraryLog{l.Handler.WithGroup(name)} }
