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

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
)

const imageUsage = `minicri image handles the images of this node.

  minicri image import FILE   bring in the images of an archive (docker save, OCI layout; - is stdin)
  minicri image pull REF      pull an image, with a line for each layer
  minicri image ls            list the images
  minicri image rm REF|ID     remove a tag, or by id an image with all its names

They ask the daemon. Where none runs they work on its directory themselves, so
that a machine can be given images before it is a node.

`

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
	Pull(ctx context.Context, reference string, auth image.Auth, progress func(image.Progress)) (listedImage, error)
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
	flags.Usage = func() { fmt.Fprint(options.Output, imageUsage); flags.PrintDefaults() }
	flags.StringVar(&options.Socket, "socket", options.Socket, "the daemon's socket")
	flags.StringVar(&options.Store.Root, "root", options.Store.Root, "the daemon's directory, where no daemon runs")
	login := flags.String("creds", "", "user:password for pull")
	words, err := parseFlags(flags, args)
	if err != nil {
		return err
	}
	verb, argument, err := imageVerb(words)
	if err != nil {
		return err
	}
	images, err := openImages(ctx, options)
	if err != nil {
		return err
	}
	err = verb(ctx, images, argument, imageCall{options: options, login: *login})
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

// withoutCode leaves the daemon's words: the gRPC code says nothing more to a
// person.
func withoutCode(err error) error {
	if answer, ok := status.FromError(err); ok && err != nil {
		return errors.New(answer.Message())
	}
	return err
}

// imageCall is what the verbs share.
type imageCall struct {
	options imageOptions
	login   string
}

type imageVerbFunc func(ctx context.Context, images nodeImages, argument string, call imageCall) error

// imageVerb finds the verb and checks that it has the argument it needs.
func imageVerb(args []string) (imageVerbFunc, string, error) {
	if len(args) == 0 {
		return nil, "", fmt.Errorf("image: which verb?\n\n%s", imageUsage)
	}
	verbs := map[string]imageVerbFunc{"import": importArchive, "pull": pullImage, "rm": removeImage, "ls": listImages}
	verb, ok := verbs[args[0]]
	if !ok {
		return nil, "", fmt.Errorf("image: unknown verb %q\n\n%s", args[0], imageUsage)
	}
	if args[0] == "ls" && len(args) == 1 {
		return verb, "", nil
	}
	if args[0] == "ls" || len(args) != 2 {
		return nil, "", fmt.Errorf("image %s: wrong number of arguments\n\n%s", args[0], imageUsage)
	}
	return verb, args[1], nil
}

// openImages prefers the daemon: the store belongs to it while it runs.
func openImages(ctx context.Context, options imageOptions) (nodeImages, error) {
	if daemonServes(ctx, options.Socket) {
		connection, err := grpc.NewClient("unix://"+options.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
		if err != nil {
			return nil, err
		}
		return daemonImages{connection}, nil
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

func importArchive(ctx context.Context, images nodeImages, path string, call imageCall) error {
	archive := call.options.Input
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		archive = file
	}
	imported, err := images.Import(ctx, archive)
	for _, one := range imported {
		fmt.Fprintln(call.options.Output, one.shownNames()[0], one.ID)
	}
	return err
}

func pullImage(ctx context.Context, images nodeImages, reference string, call imageCall) error {
	var auth image.Auth
	auth.Username, auth.Password, _ = strings.Cut(call.login, ":")
	lines := newLayerLines(call.options.Output)
	pulled, err := images.Pull(ctx, reference, auth, lines.show)
	lines.end()
	if err != nil {
		return err
	}
	fmt.Fprintln(call.options.Output, pulled.ID)
	return nil
}

func removeImage(ctx context.Context, images nodeImages, refOrID string, _ imageCall) error {
	return images.Remove(ctx, refOrID)
}

func listImages(ctx context.Context, images nodeImages, _ string, call imageCall) error {
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
	logger, err := newLogger(c)
	if err != nil {
		return err
	}
	return runImage(ctx, arguments, imageOptions{Socket: c.Socket, Store: imageConfig(c, logger), Input: os.Stdin, Output: output})
}
