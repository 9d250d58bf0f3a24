package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/server"
)

// imageOptions is what runImage needs to know of the daemon.
type imageOptions struct {
	Socket string       // where a daemon serves
	Store  image.Config // its images, used when no daemon serves
	Input  io.Reader    // the archive "-"
	Output io.Writer

	Creds, Platform string // of a pull
	JSON            bool   // the form of a list
	Force           bool   // whether a file may be overwritten
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

// listedImage is an image as programs read it, too.
type listedImage struct {
	ID string `json:"id"`
	// Tags are names, Digests the same repositories with the manifest's digest.
	Tags    []string `json:"tags"`
	Digests []string `json:"digests"`
	Size    int64    `json:"size"`
}

// runImage is `minicri image`: words are the verb and its arguments.
func runImage(ctx context.Context, words []string, options imageOptions) error {
	verb, arguments, err := imageVerb(words)
	if err != nil {
		return err
	}
	images, err := openImages(ctx, words[0], options)
	if errors.Is(err, fs.ErrNotExist) && words[0] == "ls" {
		return printImages(nil, options)
	}
	if err != nil {
		return err
	}
	err = verb(ctx, images, arguments, options)
	return errors.Join(withoutCode(err), images.Close())
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

type imageVerbFunc func(ctx context.Context, images nodeImages, arguments []string, call imageOptions) error

// imageVerb finds the verb and checks that it has the arguments it needs.
func imageVerb(args []string) (imageVerbFunc, []string, error) {
	if len(args) == 0 {
		return nil, nil, misused("image: a verb is missing: `minicri help image` lists them")
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
		return nil, nil, misused("image: unknown verb %q: `minicri help image` lists them", args[0])
	}
	if len(args)-1 != verb.arguments {
		return nil, nil, misused("image %s: wrong number of arguments: `minicri help image %s`", args[0], args[0])
	}
	return verb.run, args[1:], nil
}

// openImages prefers the daemon: the store belongs to it while it runs.
func openImages(ctx context.Context, verb string, options imageOptions) (nodeImages, error) {
	if daemonServes(ctx, options.Socket) {
		connection, err := dialDaemon(options.Socket)
		if err != nil {
			return nil, err
		}
		return daemonImages{server.ImageTransferClient{Connection: connection}, connection}, nil
	}
	if err := needsStore(verb, options.Store.Root); err != nil {
		return nil, err
	}
	store, err := image.Open(ctx, options.Store)
	if err != nil {
		return nil, fmt.Errorf("no daemon serves at %s, and: %w", options.Socket, err)
	}
	return storeImages{store, slices.Contains([]string{"ls", "inspect", "save"}, verb)}, nil
}

// needsStore is an error where nothing but a pull or an import has something to do: a
// command that looks makes no store.
func needsStore(verb, root string) error {
	if verb == "pull" || verb == "import" {
		return nil
	}
	dir := filepath.Join(root, "image")
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("no daemon serves, and there are no images of one: %w", err)
	}
	return nil
}

// create makes a file that is not there; with force it replaces one that is.
func create(path string, force bool) (*os.File, error) {
	how := os.O_EXCL
	if force {
		how = os.O_TRUNC
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|how, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("%s is there already: name another file, or give --force", path)
	}
	return file, err
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

func listImages(ctx context.Context, images nodeImages, _ []string, call imageOptions) error {
	all, err := images.List(ctx)
	if err != nil {
		return err
	}
	return printImages(all, call)
}

func printImages(all []listedImage, call imageOptions) error {
	if call.JSON {
		encoder := json.NewEncoder(printableJSON{call.Output})
		encoder.SetIndent("", "  ")
		return encoder.Encode(append([]listedImage{}, all...))
	}
	table := tabwriter.NewWriter(call.Output, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "IMAGE\tDIGEST\tID\tSIZE")
	for _, one := range all {
		for _, name := range one.shownNames() {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", redact.Printable(name), shortID(one.digest()), shortID(one.ID), humanSize(one.Size))
		}
	}
	return table.Flush()
}

func (i listedImage) shownNames() []string {
	switch {
	case len(i.Tags) > 0:
		return i.Tags
	case len(i.Digests) > 0:
		return i.Digests
	default:
		return []string{"<none>"}
	}
}

// digest is that of the manifest, by which a registry has the image; "" if it comes from
// none.
func (i listedImage) digest() string {
	for _, name := range i.Digests {
		if _, digest, found := strings.Cut(name, "@"); found {
			return digest
		}
	}
	return ""
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
	options := imageOptions{Input: os.Stdin, Output: output}
	l, words, err := look(arguments, func(set *flag.FlagSet) {
		set.StringVar(&options.Creds, "creds", "", "")
		set.StringVar(&options.Platform, "platform", "", "")
		set.BoolVar(&options.JSON, "json", false, "")
		set.BoolVar(&options.Force, "force", false, "")
	})
	if err != nil {
		return err
	}
	logger, _, err := newLogger(l.Config)
	if err != nil {
		return err
	}
	options.Socket, options.Store = l.Socket, imageConfig(l.Config, logger)
	return runImage(ctx, words, options)
}

func importArchive(ctx context.Context, images nodeImages, arguments []string, call imageOptions) error {
	archive := call.Input
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
		fmt.Fprintln(call.Output, redact.Printable(one.shownNames()[0]), one.ID)
	}
	return err
}

// saveArchive removes the file if the archive is not complete.
func saveArchive(ctx context.Context, images nodeImages, arguments []string, call imageOptions) error {
	refOrID, path := arguments[0], arguments[1]
	if path == "-" {
		return withoutCode(images.Save(ctx, refOrID, call.Output))
	}
	file, err := create(path, call.Force)
	if err != nil {
		return err
	}
	if err := errors.Join(withoutCode(images.Save(ctx, refOrID, file)), file.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

func pullImage(ctx context.Context, images nodeImages, arguments []string, call imageOptions) error {
	var auth image.Auth
	auth.Username, auth.Password, _ = strings.Cut(call.Creds, ":")
	lines := newLayerLines(call.Output)
	pulled, err := images.Pull(ctx, arguments[0], call.Platform, auth, lines.show)
	lines.end()
	if err != nil {
		return err
	}
	fmt.Fprintln(call.Output, pulled.ID)
	return nil
}

func inspectImage(ctx context.Context, images nodeImages, arguments []string, call imageOptions) error {
	described, err := images.Describe(ctx, arguments[0])
	if err != nil {
		return err
	}
	encoder := json.NewEncoder(printableJSON{call.Output})
	encoder.SetIndent("", "  ")
	return encoder.Encode(described)
}

func tagImage(ctx context.Context, images nodeImages, arguments []string, _ imageOptions) error {
	return images.Tag(ctx, arguments[0], arguments[1])
}

func untagImage(ctx context.Context, images nodeImages, arguments []string, _ imageOptions) error {
	if _, err := images.Describe(ctx, arguments[0]); err != nil { // the call itself succeeds for none
		return err
	}
	return images.Untag(ctx, arguments[0])
}

func removeImage(ctx context.Context, images nodeImages, arguments []string, _ imageOptions) error {
	if _, err := images.Describe(ctx, arguments[0]); err != nil {
		return err
	}
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
		all[i] = listedImage{ID: one.ID, Tags: one.Tags, Size: one.Size}
	}
	return all, err
}

func (d daemonImages) Pull(ctx context.Context, reference, platform string, auth image.Auth, progress func(image.Progress)) (listedImage, error) {
	request := server.TransferRequest{Reference: reference, Platform: platform, Auth: auth}
	pulled, err := d.ImageTransferClient.Pull(ctx, request, progress)
	return listedImage{ID: pulled.ID, Tags: pulled.Tags, Size: pulled.Size}, err
}

func (d daemonImages) List(ctx context.Context) ([]listedImage, error) {
	response, err := runtimeapi.NewImageServiceClient(d.connection).ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return nil, err
	}
	var all []listedImage
	for _, one := range response.GetImages() {
		all = append(all, listedImage{ID: one.GetId(), Tags: one.GetRepoTags(), Digests: one.GetRepoDigests(), Size: int64(one.GetSize())})
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
type storeImages struct {
	*image.Store
	// looks: the command changes nothing, so nothing is collected.
	looks bool
}

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
	if s.looks {
		return s.Store.Close()
	}
	return errors.Join(s.Collect(context.Background()), s.Store.Close())
}

func listedImages(images []image.Image) []listedImage {
	all := make([]listedImage, len(images))
	for i, one := range images {
		all[i] = listedImage{ID: one.ID, Tags: one.RepoTags, Digests: one.RepoDigests, Size: one.Size}
	}
	return all
}
