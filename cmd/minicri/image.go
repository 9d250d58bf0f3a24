package main

import (
	"context"
	"encoding/json"
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
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
	"github.com/minicri/minicri/internal/redact"
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
			fmt.Fprintf(table, "%s\t%s\t%s\n", redact.Printable(name), shortID(one.ID), humanSize(one.Size))
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

func importArchive(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	archive := call.options.Input
	if path := arguments[0]; path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		archive = file
	}
	imported, err := images.Import(ctx, archive)
	for _, one := range imported {
		fmt.Fprintln(call.options.Output, redact.Printable(one.shownNames()[0]), one.ID)
	}
	return err
}

// saveArchive removes the file if the archive is not complete.
func saveArchive(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	refOrID, path := arguments[0], arguments[1]
	if path == "-" {
		return withoutCode(images.Save(ctx, refOrID, call.options.Output))
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(withoutCode(images.Save(ctx, refOrID, file)), file.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

func pullImage(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	var auth image.Auth
	auth.Username, auth.Password, _ = strings.Cut(call.login, ":")
	lines := newLayerLines(call.options.Output)
	pulled, err := images.Pull(ctx, arguments[0], call.platform, auth, lines.show)
	lines.end()
	if err != nil {
		return err
	}
	fmt.Fprintln(call.options.Output, pulled.ID)
	return nil
}

func inspectImage(ctx context.Context, images nodeImages, arguments []string, call imageCall) error {
	described, err := images.Describe(ctx, arguments[0])
	if err != nil {
		return err
	}
	encoder := json.NewEncoder(printableJSON{call.options.Output})
	encoder.SetIndent("", "  ")
	return encoder.Encode(described)
}

func tagImage(ctx context.Context, images nodeImages, arguments []string, _ imageCall) error {
	return images.Tag(ctx, arguments[0], arguments[1])
}

func untagImage(ctx context.Context, images nodeImages, arguments []string, _ imageCall) error {
	return images.Untag(ctx, arguments[0])
}

func removeImage(ctx context.Context, images nodeImages, arguments []string, _ imageCall) error {
	return images.Remove(ctx, arguments[0])
}

// layerLines shows a pull: on a terminal one line for each blob, rewritten as it
// proceeds; elsewhere a line when a blob is done.
type layerLines struct {
	output   io.Writer
	terminal bool
	order    []string
	latest   map[string]image.Progress
	shown    int // lines on the terminal
}

func newLayerLines(output io.Writer) *layerLines {
	return &layerLines{output: output, terminal: isTerminal(output), latest: map[string]image.Progress{}}
}

func isTerminal(output io.Writer) bool {
	file, ok := output.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

// show shows the progress of one layer. Calls do not overlap.
func (l *layerLines) show(p image.Progress) {
	before, known := l.latest[p.Digest]
	if !known {
		l.order = append(l.order, p.Digest)
	}
	l.latest[p.Digest] = p
	switch {
	case l.terminal:
		l.redraw()
	case p.Stage == image.StageDone && before.Stage != image.StageDone:
		fmt.Fprintln(l.output, line(p))
	}
}

func (l *layerLines) redraw() {
	if l.shown > 0 {
		fmt.Fprintf(l.output, "\x1b[%dA", l.shown)
	}
	for _, digest := range l.order {
		fmt.Fprintf(l.output, "\x1b[2K%s\n", line(l.latest[digest]))
	}
	l.shown = len(l.order)
}

// end shows what is left of blobs that need no unpacking.
func (l *layerLines) end() {
	if !l.terminal {
		return
	}
	for digest, p := range l.latest {
		if p.Done == p.Total {
			p.Stage = image.StageDone
			l.latest[digest] = p
		}
	}
	l.redraw()
}

func line(p image.Progress) string {
	return fmt.Sprintf("%s  %-12s %s of %s", shortID(p.Digest), p.Stage, humanSize(p.Done), humanSize(p.Total))
}

// daemonImages asks a running daemon.
type daemonImages struct {
	server.ImageTransferClient
	connection *grpc.ClientConn
}

func (d daemonImages) Import(ctx context.Context, archive io.Reader) ([]listedImage, error) {
	imported, err := d.ImageTransferClient.Import(ctx, archive)
	all := make([]listedImage, len(imported))
	for i, one := range imported {
		all[i] = listedImage{ID: one.ID, Names: one.Tags, Size: one.Size}
	}
	return all, err
}

func (d daemonImages) Pull(ctx context.Context, reference, platform string, auth image.Auth, progress func(image.Progress)) (listedImage, error) {
	request := server.TransferRequest{Reference: reference, Platform: platform, Auth: auth}
	pulled, err := d.ImageTransferClient.Pull(ctx, request, progress)
	return listedImage{ID: pulled.ID, Names: pulled.Tags, Size: pulled.Size}, err
}

func (d daemonImages) List(ctx context.Context) ([]listedImage, error) {
	response, err := runtimeapi.NewImageServiceClient(d.connection).ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return nil, err
	}
	var all []listedImage
	for _, one := range response.GetImages() {
		names := one.GetRepoTags()
		if len(names) == 0 {
			names = one.GetRepoDigests()
		}
		all = append(all, listedImage{ID: one.GetId(), Names: names, Size: int64(one.GetSize())})
	}
	return all, nil
}

func (d daemonImages) Remove(ctx context.Context, refOrID string) error {
	spec := &runtimeapi.ImageSpec{Image: refOrID}
	_, err := runtimeapi.NewImageServiceClient(d.connection).RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: spec})
	return err
}

func (d daemonImages) Close() error { return d.connection.Close() }

// storeImages works on the store itself; no daemon holds it.
type storeImages struct{ *image.Store }

func (s storeImages) Import(ctx context.Context, archive io.Reader) ([]listedImage, error) {
	imported, err := s.Store.Import(ctx, archive)
	return listedImages(imported), err
}

func (s storeImages) Pull(ctx context.Context, reference, platform string, auth image.Auth, progress func(image.Progress)) (listedImage, error) {
	pulled, err := s.PullFor(ctx, reference, platform, auth, progress)
	return listedImages([]image.Image{pulled})[0], err
}

func (s storeImages) Tag(ctx context.Context, refOrID, name string) error {
	_, err := s.Store.Tag(ctx, refOrID, name)
	return err
}

func (s storeImages) List(context.Context) ([]listedImage, error) {
	return listedImages(s.Store.List()), nil
}

// Close collects first: there is no background once the process ends.
func (s storeImages) Close() error {
	err := s.Collect(context.Background())
	if closeErr := s.Store.Close(); err == nil {
		err = closeErr
	}
	return err
}

func listedImages(images []image.Image) []listedImage {
	all := make([]listedImage, len(images))
	for i, one := range images {
		names := one.RepoTags
		if len(names) == 0 {
			names = one.RepoDigests
		}
		all[i] = listedImage{ID: one.ID, Names: names, Size: one.Size}
	}
	return all
}
