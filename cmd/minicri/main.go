// Command minicri is a Kubernetes container runtime: it serves the CRI on a
// unix socket. Without a command it is the daemon, in the foreground.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
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
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		sayLast(os.Stderr, toJournal(os.Stderr), err)
		if _, usage := errors.AsType[usageError](err); usage {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

// usageError is an invalid command line: the exit code is 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func misused(format string, values ...any) error { return usageError{fmt.Errorf(format, values...)} }

// command runs the command that the arguments name, or the daemon.
func command(ctx context.Context, arguments []string, output io.Writer) error {
	switch {
	case len(arguments) == 1 && slices.Contains([]string{"--version", "-version", "-v"}, arguments[0]):
		arguments = []string{"version"}
	case len(arguments) == 0 || strings.HasPrefix(arguments[0], "-"):
		return serve(ctx, arguments)
	case slices.ContainsFunc([]string{"--help", "-help", "-h"}, func(flag string) bool { return slices.Contains(arguments, flag) }):
		return help(arguments, output)
	}
	switch rest := arguments[1:]; arguments[0] {
	case "config":
		return configCommand(ctx, rest, output)
	case "check":
		return checkCommand(ctx, rest, output)
	case "image":
		return imageCommand(ctx, rest, output)
	case "debug":
		return debugCommand(ctx, rest, output)
	case "pods":
		return podsCommand(ctx, rest, output)
	case "timeline":
		return timelineCommand(ctx, rest, output)
	case "version":
		_, err := fmt.Fprintln(output, "minicri", version)
		return err
	case "help":
		return help(rest, output)
	default:
		return misused("unknown command %q: `minicri help` lists all", arguments[0])
	}
}

// help describes the command that the words begin with, or lists the commands of a group, or all.
func help(words []string, output io.Writer) error {
	if i := slices.IndexFunc(words, func(word string) bool { return strings.HasPrefix(word, "-") }); i >= 0 {
		words = words[:i]
	}
	if len(words) == 0 {
		_, err := fmt.Fprint(output, manual.Usage())
		return err
	}
	for n := len(words); n > 0; n-- {
		name := strings.Join(words[:n], " ")
		if i := slices.IndexFunc(manual.Commands(), func(c manual.Command) bool { return c.Words == name }); i >= 0 {
			set := flag.NewFlagSet("minicri", flag.ContinueOnError)
			set.SetOutput(output)
			if manual.Commands()[i].Configured {
				config.Default().Flags(set, new(string))
			}
			manual.Commands()[i].Describe(set)
			return nil
		}
		if group := manual.UsageOf(name); group != "" {
			_, err := fmt.Fprint(output, group)
			return err
		}
	}
	return misused("unknown command %q: `minicri help` lists all", words[0])
}
