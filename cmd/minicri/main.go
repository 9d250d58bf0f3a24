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
	"strings"
	"syscall"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/redact"
)

// version is a semantic version, set by the linker (hack/version).
var version = "0.1.0-dev"

func main() {
	if image.IsZstdDecoder() {
		os.Exit(image.DecodeZstd())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := command(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "minicri:", redact.Printable(err.Error()))
		os.Exit(1)
	}
}

// command runs the command that the arguments begin with; the daemon if they
// begin with a flag.
func command(ctx context.Context, arguments []string, output io.Writer) error {
	if len(arguments) == 0 || strings.HasPrefix(arguments[0], "-") {
		return serve(ctx, arguments)
	}
	switch rest := arguments[1:]; arguments[0] {
	case "config":
		return configCommand(rest, output)
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
		_, err := fmt.Fprint(output, manual.Usage())
		return err
	default:
		return fmt.Errorf("unknown command %q\n\n%s", arguments[0], manual.Usage())
	}
}
