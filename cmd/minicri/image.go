package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/server"
)

// imageUsage is the help of all verbs.
func imageUsage() string {
	return "minicri image handles the images of this node. A REFERENCE is a name or an id.\n\n" + manual.UsageOf("image") + `
The commands ask the daemon. Where none runs they work on its directory, so that
a machine can be given images before it is a node.

`
}

// imageOptions is what runImage needs to know of the daemon.
type imageOptions struct {
	Socket string       // where a daemon serves
	Store  image.Config // its images, used when no daemon serves
	Input  io.Reader    // the archive "-"
	Output io.Writer
}

// nodeImages is the node's images, by way of the daemon or without it.
type nodeImages interface {
	Import(ctx context.Context, archive io.Reader) ([]listedImage, error)
	Pull(ctx context.Context, reference, platform string, auth image.Auth, progress func(image.Progress)) (listedImage, error)
	Save(ctx context.Context, refOrID string, archive io.Writer) error
	Describe(ctx context.Context, refOrID string) (image.Description, error)
	Tag(ctx context.Context, refOrID, name string) error
	Untag(ctx context.Context, name string) error
	List(ctx context.Context) ([]listedImage, error)
	Remove(ctx context.Context, refOrID string) error
	Close() error
}

type listedImage struct {
	ID    string
	Names []string
	Size  int64
}

// runImage is `minicri image`: args are what follows it.
func runImage(ctx context.Context, args []string, options imageOptions) error {
	flags := flag.NewFlagSet("minicri image", flag.ContinueOnError)
	flags.SetOutput(options.Output)
	flags.Usage = func() { fmt.Fprint(options.Output, imageUsage()); flags.PrintDefaults() }
	flags.StringVar(&options.Socket, "socket", options.Socket, "the daemon's socket")
	flags.StringVar(&options.Store.Root, "root", options.Store.Root, "the daemon's directory, where no daemon runs")
	login := flags.String("creds", "", "user:password for pull")
	platform := flags.String("platform", "", "os/arch[/variant] for pull; the node's if empty")
	words, err := parseFlags(flags, args)
	if err != nil {
		return err
	}
	verb, arguments, err := imageVerb(words)
	if err != nil {
		return err
	}
	images, err := openImages(ctx, options)
	if err != nil {
		return err
	}
	err = verb(ctx, images, arguments, imageCall{options: options, login: *login, platform: *platform})
	return errors.Join(withoutCode(err), images.Close())
}

// parseFlags parses flags before and after the verb, and returns the other
// arguments.
func parseFlags(flags *flag.FlagSet, args []string) (words []string, err error) {
	for {
		if err := flags.Parse(args); err != nil || flags.NArg() == 0 {
			return words, err
		}
		words = append(words, flags.Arg(0))
		args = flags.Args()[1:]
	}
}

// withoutCode returns the message of a gRPC status, in the words of the daemon's log:
// of its code it has what the message leaves out (package errtext).
func withoutCode(err error) error {
	answer, ok := status.FromError(err)
	if !ok || err == nil {
		return err
	}
	kind := map[codes.Code]error{codes.NotFound: errdefs.ErrNotFound, codes.AlreadyExists: errdefs.ErrAlreadyExists}[answer.Code()]
	if kind != nil && !strings.Contains(answer.Message(), kind.Error()) {
		return fmt.Errorf("%s: %w", answer.Message(), kind)
	}
	return errors.New(answer.Message())
}

// imageCall is what the verbs share.
type imageCall struct {
	options  imageOptions
	login    string
	platform string
}

type imageVerbFunc func(ctx context.Context, images nodeImages, arguments []string, call imageCall) error

// imageVerb finds the verb and checks that it has the arguments it needs.
func imageVerb(args []string) (imageVerbFunc, []string, error) {
	if len(args) == 0 {
		return nil, nil, fmt.Errorf("image: a verb is missing\n\n%s", imageUsage())
	}
	verbs := map[string]struct {
		run       imageVerbFunc
		arguments int
	}{
		"import": {importArchive, 1}, "save": {saveArchive, 2}, "pull": {pullImage, 1}, "rm": {removeImage, 1}, "ls": {listImages, 0},
		"inspect": {inspectImage, 1}, "tag": {tagImage, 2}, "untag": {untagImage, 1},
	}
	verb, ok := verbs[args[0]]
	if !ok {
		return nil, nil, fmt.Errorf("image: unknown verb %q\n\n%s", args[0], imageUsage())
	}
	if len(args)-1 != verb.arguments {
		return nil, nil, fmt.Errorf("image %s: wrong number of arguments\n\n%s", args[0], imageUsage())
	}
	return verb.run, args[1:], nil
}

// openImages prefers the daemon: the store belongs to it while it runs.
func openImages(ctx context.Context, options imageOptions) (nodeImages, error) {
	if daemonServes(ctx, options.Socket) {
		connection, err := grpc.NewClient("unix://"+options.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
		if err != nil {
			return nil, err
		}
		return daemonImages{server.ImageTransferClient{Connection: connection}, connection}, nil
	}
	store, err := image.Open(ctx, options.Store)
	if err != nil {
		return nil, fmt.Errorf("no daemon serves at %s, and: %w", options.Socket, err)
	}
	return storeImages{store}, nil
}

func daemonServes(ctx context.Context, socket string) bool {
	dialer := net.Dialer{Timeout: time.Second}
	connection, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return false
	}
	_ = connection.Close()
	return true
}

func listImages(ctx context.Context, images nodeImages, _ []string, call imageCall) error {
	all, err := images.List(ctx)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(call.options.Output, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "IMAGE\tID\tSIZE")
	for _, one := range all {
		for _, name := range one.shownNames() {
			fmt.Fprintf(table, "%s\t%s\t%s\n", name, shortID(one.ID), humanSize(one.Size))
		}
	}
	return table.Flush()
}

func (i listedImage) shownNames() []string {
	if len(i.Names) == 0 {
		return []string{"<none>"}
	}
	return i.Names
}

func shortID(id string) string {
	id = strings.TrimPrefix(id, "sha256:")
	return id[:min(12, len(id))]
}

func humanSize(bytes int64) string {
	const unit = 1024.0
	size, names := float64(bytes), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for len(names) > 1 && size >= unit {
		size, names = size/unit, names[1:]
	}
	return fmt.Sprintf("%.4g %s", size, names[0])
}

// imageCommand runs `minicri image` with the configuration of the daemon.
func imageCommand(ctx context.Context, arguments []string, output io.Writer) error {
	c, err := config.Load(nil, os.Stderr)
	if err != nil {
		return err
	}
	logger, _, err := newLogger(c)
	if err != nil {
		return err
	}
	return runImage(ctx, arguments, imageOptions{Socket: c.Socket, Store: imageConfig(c, logger), Input: os.Stdin, Output: output})
}
